"""Which worker a request goes to. Pure.

The scheduler allocates the blocks of every worker, so what it knows of their caches is what is
there: no index of its own can disagree.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from scheduler_svc.core.view import Limits


class Placement(StrEnum):
    """`least_work` weighs what the caches hold; `round_robin` does not look."""

    LEAST_WORK = "least_work"
    ROUND_ROBIN = "round_robin"


@dataclass(frozen=True, slots=True)
class Demand:
    """What one request wants of a lane, given what the lane's cache holds of it."""

    num_rows: int
    num_new_blocks: int
    num_uncached_tokens: int
    # Blocks that new requests leave free.
    watermark: int


# What any request wants at least.
_LEAST = Demand(num_rows=1, num_new_blocks=1, num_uncached_tokens=1, watermark=0)


@dataclass(slots=True)
class LaneBudget:
    """What one lane has left in a round of placement; thrown away with it."""

    limits: Limits
    num_rows: int
    num_free_blocks: int
    # Tokens of prompts on the lane that are not computed yet, and what its next step could take
    # of them.
    num_queued_tokens: int = 0
    num_next_tokens: int = 0
    num_long_prompts: int = 0

    def cost(self, demand: Demand) -> int:
        """Tokens computed before the request's first one, or beside it in each step."""
        return demand.num_uncached_tokens + self.num_queued_tokens + self.num_rows

    def has_room(self, demand: Demand) -> bool:
        """It can start in one of the lane's next steps. A lane that has nothing takes anything."""
        if self.num_rows == 0 and self.num_queued_tokens == 0:
            return True
        limits = self.limits
        return (
            self.num_rows + min(demand.num_rows, limits.max_num_seqs) <= limits.max_num_seqs
            and self.num_next_tokens < limits.max_num_batched_tokens
            and demand.num_new_blocks <= self.num_free_blocks - demand.watermark
        )

    @property
    def is_open(self) -> bool:
        """Some request has room."""
        return self.has_room(_LEAST)

    def take(self, demand: Demand) -> None:
        self.num_rows += demand.num_rows
        self.num_free_blocks -= demand.num_new_blocks
        self.queue(demand.num_uncached_tokens)

    def queue(self, num_tokens: int) -> None:
        """Counts a prompt with so many tokens to compute. Long ones are cut where there are others,
        and wait where they are too many."""
        limits = self.limits
        self.num_queued_tokens += num_tokens
        if not limits.is_long(num_tokens):
            self.num_next_tokens += num_tokens
        elif limits.has_room_for_long(self.num_long_prompts):
            self.num_next_tokens += limits.long_prefill_token_threshold
            self.num_long_prompts += 1


def choose_lane(lanes: Sequence[LaneBudget], demands: Sequence[Demand]) -> int | None:
    """The index of the lane with the least work before the first token; None: no lane has room."""
    costs = [
        (lane.cost(demand), index)
        for index, (lane, demand) in enumerate(zip(lanes, demands, strict=True))
        if lane.has_room(demand)
    ]
    return min(costs)[1] if costs else None
