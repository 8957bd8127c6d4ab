"""Divides the layers of a model into stages. Pure."""


def divide(num_layers: int, num_stages: int, head_cost: float) -> tuple[int, ...]:
    """The number of layers of each stage, so that the largest cost of a stage is as small as
    possible, and costs are about equal. A layer costs 1, and the last stage has the head, which
    costs `head_cost`. An embedding, of which a pass reads few rows, costs nothing. ValueError if
    there are fewer layers than stages."""
    if not 0 < num_stages <= num_layers:
        raise ValueError(f"{num_layers} layers cannot be divided into {num_stages} stages")
    if num_stages == 1:
        return (num_layers,)

    def costs(last: int) -> tuple[float, float]:
        found = [*_equal(num_layers - last, num_stages - 1), last + head_cost]
        return max(found), sum(cost * cost for cost in found)

    last = min(range(1, num_layers - num_stages + 2), key=costs)
    return (*_equal(num_layers - last, num_stages - 1), last)


def _equal(num_layers: int, num_stages: int) -> list[int]:
    """The first stages, of which the middle ones get a remainder, and then the first: its rank 0
    samples as well."""
    each, remainder = divmod(num_layers, num_stages)
    counts = [each] * num_stages
    for stage in [*range(1, num_stages), 0][:remainder]:
        counts[stage] += 1
    return counts
