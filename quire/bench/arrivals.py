"""When requests arrive."""

import math
import random
from itertools import accumulate
from typing import Literal, get_args

Arrival = Literal["poisson", "fixed"]
ARRIVALS: tuple[Arrival, ...] = get_args(Arrival)


def arrival_named(name: str) -> Arrival:
    """ValueError, with what was written, for what is none."""
    for arrival in ARRIVALS:
        if arrival == name:
            return arrival
    raise ValueError(f"arrival: must be {' or '.join(ARRIVALS)} (got {name!r})")


def arrival_times(
    num_requests: int, rate_per_s: float, arrival: Arrival, seed: int = 0
) -> list[float]:
    """Seconds at which requests are due, from 0 on, in order.

    The rate is that of the gaps' mean, which `poisson` draws from an exponential distribution and
    `fixed` makes equal. An infinite one has all of them arrive at once. ValueError for a rate that
    is not above 0.
    """
    if math.isnan(rate_per_s) or rate_per_s <= 0:
        raise ValueError(f"request rate: must be above 0 (got {rate_per_s})")
    if math.isinf(rate_per_s):
        return [0.0] * num_requests
    # Apart from the requests' own: another rate does not change what is asked.
    rng = random.Random(f"arrivals {seed}")
    gaps = (_gap_s(rate_per_s, arrival, rng) for _ in range(num_requests - 1))
    return list(accumulate(gaps, initial=0.0))


def _gap_s(rate_per_s: float, arrival: Arrival, rng: random.Random) -> float:
    return rng.expovariate(rate_per_s) if arrival == "poisson" else 1 / rate_per_s
