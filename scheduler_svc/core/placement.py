"""Which worker a request goes to. A pure function.

The scheduler allocates the blocks of every worker, so what it knows of their caches is what is
there: no index of its own can disagree.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LaneLoad:
    """What a lane offers to one request."""

    num_uncached_tokens: int
    # Prompt tokens of requests on the lane that are not computed yet.
    num_queued_tokens: int
    num_running: int
    has_room: bool


def choose_lane(lanes: Sequence[LaneLoad]) -> int | None:
    """The index of the lane with the least work before the first token; None: no lane has room."""
    costs = [
        (lane.num_uncached_tokens + lane.num_queued_tokens + lane.num_running, index)
        for index, lane in enumerate(lanes)
        if lane.has_room
    ]
    return min(costs)[1] if costs else None
