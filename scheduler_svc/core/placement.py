"""Chooses the worker of a request. Pure.

The scheduler allocates the blocks of every worker, so its view of their caches is exact: there is
no separate index that could disagree.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from scheduler_svc.core.view import Limits


class Placement(StrEnum):
    """`least_work` takes cached prefixes into account; `round_robin` does not."""

    LEAST_WORK = "least_work"
    ROUND_ROBIN = "round_robin"


@dataclass(frozen=True, slots=True)
class Demand:
    """What one request needs on a lane, given its cached prefix there."""

    num_rows: int
    num_new_blocks: int
    num_uncached_tokens: int
    # Blocks that new requests must leave free.
    watermark: int
    # The rows may be taken a few at a time.
    is_divisible: bool = True


# The least that any request needs.
_LEAST = Demand(num_rows=1, num_new_blocks=1, num_uncached_tokens=1, watermark=0)


@dataclass(slots=True)
class LaneBudget:
    """The load and the free blocks of one lane during one pass of placement."""

    limits: Limits
    num_rows: int  # that its sequences have or wait for
    num_free_blocks: int
    # Uncomputed prompt tokens on the lane, and how many of them its next step could compute.
    num_queued_tokens: int = 0
    num_next_tokens: int = 0
    num_long_prompts: int = 0

    def cost(self, demand: Demand) -> int:
        """Tokens to compute before its first token: uncached ones, queued ones, one per row."""
        return demand.num_uncached_tokens + self.num_queued_tokens + self.num_rows

    def has_room(self, demand: Demand) -> bool:
        """Whether it can start in one of the lane's next steps. An empty lane accepts anything but
        what needs more rows at once than it has."""
        if demand.num_rows > self.limits.max_num_seqs and not demand.is_divisible:
            return False
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
        """Whether the smallest request has room."""
        return self.has_room(_LEAST)

    def take(self, demand: Demand) -> None:
        self.num_rows += demand.num_rows
        self.num_free_blocks -= demand.num_new_blocks
        self.queue(demand.num_uncached_tokens)

    def queue(self, num_tokens: int) -> None:
        """Count a prompt with `num_tokens` to compute. Of a long prompt the next step computes one
        chunk, or nothing if as many long prompts as allowed are in progress."""
        limits = self.limits
        self.num_queued_tokens += num_tokens
        if not limits.is_long(num_tokens):
            self.num_next_tokens += num_tokens
        elif limits.has_room_for_long(self.num_long_prompts):
            self.num_next_tokens += limits.long_prefill_token_threshold
            self.num_long_prompts += 1


def choose_lane(lanes: Sequence[LaneBudget], demands: Sequence[Demand]) -> int | None:
    """Index of the lane with the least work before the first token; None if no lane has room."""
    costs = [
        (lane.cost(demand), index)
        for index, (lane, demand) in enumerate(zip(lanes, demands, strict=True))
        if lane.has_room(demand)
    ]
    return min(costs)[1] if costs else None
