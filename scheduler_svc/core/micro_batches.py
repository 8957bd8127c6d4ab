"""Divides the decodes of a lane among plans in flight, on a worker with several stages. Pure."""

from collections.abc import Iterable

from scheduler_svc.core.view import LaneView, SeqT


def not_in_flight(view: LaneView[SeqT]) -> Iterable[SeqT]:
    """The rows that may run."""
    if not view.in_flight:
        return view.running
    return [row for row in view.running if row not in view.in_flight]


def num_decodes_in_flight(view: LaneView[SeqT]) -> int:
    """Rows that decode after their plan in flight. Their next tokens wait for each plan between."""
    return sum(row.num_tokens - row.num_computed_tokens == 1 for row in view.in_flight)


def micro_batch(view: LaneView[SeqT], decodes: list[SeqT]) -> list[SeqT]:
    """Those of the decodes that are not in flight which run now: at most an equal part of all
    decodes, and not so many that a plan that can be sent at once would have none. Rows that have
    waited longest are first. Beams run together."""
    num_plans = view.num_micro_batches - len({row.last_step for row in view.in_flight})
    most = min(
        _part(len(decodes) + num_decodes_in_flight(view), view.num_micro_batches),
        _part(len(decodes), max(1, num_plans)),
    )
    if len(decodes) <= most:
        return decodes
    beams = [row for row in decodes if row.is_beam]
    others = [row for row in decodes if not row.is_beam]
    others.sort(key=lambda row: (row.last_step, row.order))
    return beams + others[: max(0, most - len(beams))]


def _part(count: int, num_parts: int) -> int:
    return -(-count // num_parts)
