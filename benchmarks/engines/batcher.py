"""A minimal continuous batching scheduler: the plans that one worker would receive.

The policy is the scheduler's `chunked` policy: decodes first, then partially prefilled prompts,
then new ones, up to the token budget. Never preempts: the pool has room for all sequences.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from benchmarks.engines.workload import Work
from quire.internal.v1 import worker_pb2


@dataclass
class _Sequence:
    """One request: [0, num_computed) is in the cache, [num_computed, num_tokens) is not yet."""

    index: int
    prompt: list[int]
    # Prompt and output at the end.
    final_length: int
    num_tokens: int
    row: int = 0
    num_computed: int = 0
    block_ids: list[int] = field(default_factory=list)

    @property
    def num_missing(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def has_ended(self) -> bool:
        return self.num_tokens >= self.final_length


@dataclass(frozen=True)
class Step:
    """A plan, and the requests whose tokens it samples."""

    plan: worker_pb2.BatchPlan
    # Index of the request by row that samples.
    sampling: dict[int, int]
    num_scheduled_tokens: int


def steps(
    work: Work, *, max_num_seqs: int, max_num_batched_tokens: int, block_size: int, num_blocks: int
) -> Iterator[Step]:
    """Yield all steps of the work, the last of which only releases rows. They depend on lengths
    alone, not on sampled tokens. ValueError if the pool is too small."""
    batcher = _Batcher(work, max_num_seqs, max_num_batched_tokens, block_size, num_blocks)
    while not batcher.is_done:
        yield batcher.step()


class _Batcher:
    """Assigns rows, blocks and the token budget."""

    def __init__(
        self, work: Work, max_num_seqs: int, budget: int, block_size: int, num_blocks: int
    ) -> None:
        self._budget = budget
        self._block_size = block_size
        self._waiting = deque(
            _Sequence(index, prompt, len(prompt) + num_outputs, len(prompt))
            for index, (prompt, num_outputs) in enumerate(
                zip(work.prompts, work.num_outputs, strict=True)
            )
        )
        self._running: list[_Sequence] = []
        self._ended: list[_Sequence] = []
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        # Popped from the end: 1, 2, 3, …
        self._free_blocks = list(range(num_blocks - 1, 0, -1))
        self._temperature = work.temperature
        self._step = 0

    @property
    def is_done(self) -> bool:
        return not (self._waiting or self._running or self._ended)

    def step(self) -> Step:
        self._step += 1
        plan = worker_pb2.BatchPlan(epoch=1, step=self._step)
        self._release(plan)
        budget = self._budget
        # Decodes before chunks of prompts.
        for sequence in sorted(self._running, key=lambda one: one.num_missing > 1):
            budget -= self._schedule(plan, sequence, budget, is_new=False)
        while budget and self._waiting and self._free_rows:
            sequence = self._waiting.popleft()
            sequence.row = self._free_rows.pop()
            self._running.append(sequence)
            budget -= self._schedule(plan, sequence, budget, is_new=True)
        return Step(plan, self._sample(), self._budget - budget)

    def _release(self, plan: worker_pb2.BatchPlan) -> None:
        for sequence in self._ended:
            plan.released_rows.append(sequence.row)
            self._free_rows.append(sequence.row)
            self._free_blocks += reversed(sequence.block_ids)
        self._ended = []

    def _schedule(
        self, plan: worker_pb2.BatchPlan, sequence: _Sequence, budget: int, is_new: bool
    ) -> int:
        """Schedule a sequence and return its number of tokens, at most `budget`."""
        count = min(budget, sequence.num_missing)
        if not count:
            return 0
        new_ids = self._grow(sequence, sequence.num_computed + count)
        if is_new:
            _admit(plan.admissions, sequence, self._temperature)
        elif new_ids:
            plan.appends.rows.append(sequence.row)
            plan.appends.block_ids.extend(new_ids)
            plan.appends.num_blocks.append(len(new_ids))
        plan.schedule.rows.append(sequence.row)
        plan.schedule.num_scheduled_tokens.append(count)
        sequence.num_computed += count
        return count

    def _grow(self, sequence: _Sequence, num_tokens: int) -> list[int]:
        """Allocate and return the blocks missing for `num_tokens` tokens."""
        count = -(-num_tokens // self._block_size) - len(sequence.block_ids)
        if count > len(self._free_blocks):
            raise ValueError("the block pool is too small for these rows")
        new_ids = [self._free_blocks.pop() for _ in range(count)]
        sequence.block_ids += new_ids
        return new_ids

    def _sample(self) -> dict[int, int]:
        """Add a token to each sequence without uncomputed tokens; return the requests by row."""
        sampling = [sequence for sequence in self._running if not sequence.num_missing]
        for sequence in sampling:
            sequence.num_tokens += 1
        self._ended = [sequence for sequence in sampling if sequence.has_ended]
        self._running = [sequence for sequence in self._running if not sequence.has_ended]
        return {sequence.row: sequence.index for sequence in sampling}


def _admit(admissions: worker_pb2.Admissions, sequence: _Sequence, temperature: float) -> None:
    """Append an admission without sampling filters and log-probabilities."""
    admissions.rows.append(sequence.row)
    admissions.token_ids.extend(sequence.prompt)
    admissions.num_tokens.append(len(sequence.prompt))
    admissions.num_prompt_tokens.append(len(sequence.prompt))
    admissions.num_computed_tokens.append(0)
    admissions.block_ids.extend(sequence.block_ids)
    admissions.num_blocks.append(len(sequence.block_ids))
    admissions.temperatures.append(temperature)
    admissions.top_ks.append(0)
    admissions.top_ps.append(1.0)
    admissions.min_ps.append(0.0)
    admissions.seeds.append(sequence.index)
    admissions.num_logprobs.append(0)
    admissions.num_prompt_logprobs.append(0)
