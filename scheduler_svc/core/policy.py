"""What one lane runs in its next step. A pure function: values in, frozen values out.

Continuous batching with chunked prefill (Orca, OSDI 2022; Sarathi-Serve, OSDI 2024): decodes
first, then prefills under way, those that finish in this step before the others, then new prompts
in order of arrival, all within one budget of tokens.

A sequence is admitted only when the pool can hold it to its last token, so one that runs always
gets its next block.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


def blocks_to_the_end(max_num_tokens: int, block_size: int) -> int:
    """Blocks that a sequence holds at its end: its last token is sampled, never computed."""
    return blocks_for(max_num_tokens - 1, block_size)


@dataclass(frozen=True, slots=True)
class Limits:
    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    # Blocks that new requests leave free.
    watermark: int


@dataclass(frozen=True, slots=True)
class Running:
    """A sequence that has a row."""

    num_tokens: int
    num_computed_tokens: int
    num_held_blocks: int
    max_num_tokens: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """A sequence that wants a row, with what the cache holds of it."""

    num_tokens: int
    max_num_tokens: int
    # Of its full blocks, first to last.
    block_hashes: Sequence[bytes]
    num_hits: int
    # Hits that nobody holds: taking them costs free blocks.
    num_free_hits: int


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A running sequence's part of the step."""

    index: int
    num_scheduled_tokens: int
    num_new_blocks: int


@dataclass(frozen=True, slots=True)
class Admitted:
    """A waiting sequence's first part of a step."""

    index: int
    num_hits: int
    num_scheduled_tokens: int
    num_new_blocks: int


@dataclass(frozen=True, slots=True)
class Decision:
    scheduled: tuple[Scheduled, ...]
    admitted: tuple[Admitted, ...]


def schedule(
    limits: Limits, running: Sequence[Running], waiting: Sequence[Waiting], num_free_blocks: int
) -> Decision:
    """Decides one step. `waiting` is in order of arrival; nobody passes one that does not fit."""
    step = _Step(limits, len(running), num_free_blocks - _promised(running, limits.block_size))
    for index in sorted(range(len(running)), key=lambda i: _turn(running[i], limits)):
        step.run(index, running[index])
    for index, candidate in enumerate(waiting):
        if not step.admit(index, candidate):
            break
    return Decision(tuple(step.scheduled), tuple(step.admitted))


def _promised(running: Sequence[Running], block_size: int) -> int:
    """Blocks that running sequences do not hold yet and may need before their ends."""
    return sum(
        blocks_to_the_end(row.max_num_tokens, block_size) - row.num_held_blocks for row in running
    )


def _turn(row: Running, limits: Limits) -> int:
    remaining = row.num_tokens - row.num_computed_tokens
    if remaining == 1:
        return 0
    return 1 if remaining <= limits.max_num_batched_tokens else 2


@dataclass(slots=True)
class _Step:
    """The budget of the step being decided, thrown away with it."""

    limits: Limits
    num_rows: int
    # Free blocks that are not promised to anybody.
    num_spare_blocks: int
    scheduled: list[Scheduled] = field(default_factory=list)
    admitted: list[Admitted] = field(default_factory=list)
    num_batched_tokens: int = 0
    # Hashes of the blocks that admissions of this step fill; later ones may share them.
    planned: set[bytes] = field(default_factory=set)

    def run(self, index: int, row: Running) -> None:
        num_tokens = self._take_tokens(row.num_tokens - row.num_computed_tokens)
        if num_tokens:
            needed = blocks_for(row.num_tokens, self.limits.block_size) - row.num_held_blocks
            self.scheduled.append(Scheduled(index, num_tokens, needed))

    def admit(self, index: int, candidate: Waiting) -> bool:
        block_size = self.limits.block_size
        num_hits = self._hits(candidate)
        to_the_end = blocks_to_the_end(candidate.max_num_tokens, block_size)
        num_needed = to_the_end - num_hits + candidate.num_free_hits
        if self.num_rows >= self.limits.max_num_seqs:
            return False
        if num_needed > self.num_spare_blocks - self.limits.watermark:
            return False
        num_tokens = self._take_tokens(candidate.num_tokens - num_hits * block_size)
        if not num_tokens:
            return False
        num_filled = (num_hits * block_size + num_tokens) // block_size
        self.planned.update(candidate.block_hashes[num_hits:num_filled])
        self.num_rows += 1
        self.num_spare_blocks -= num_needed
        num_new_blocks = blocks_for(candidate.num_tokens, block_size) - num_hits
        self.admitted.append(Admitted(index, num_hits, num_tokens, num_new_blocks))
        return True

    def _hits(self, candidate: Waiting) -> int:
        """Cached blocks, and those behind them that an earlier admission fills in this step."""
        # The last token is always computed: its logits are wanted.
        most = min(
            (candidate.num_tokens - 1) // self.limits.block_size, len(candidate.block_hashes)
        )
        num_hits = min(candidate.num_hits, most)
        while num_hits < most and candidate.block_hashes[num_hits] in self.planned:
            num_hits += 1
        return num_hits

    def _take_tokens(self, wanted: int) -> int:
        num_tokens = min(wanted, self.limits.max_num_batched_tokens - self.num_batched_tokens)
        self.num_batched_tokens += num_tokens
        return num_tokens
