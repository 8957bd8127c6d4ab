"""Runs rows on a worker's runner, each with its own parameters, one token per step."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from worker_svc.plan.logits_params import LogitsParams
from worker_svc.plan.plans import Admission, BlockMoves, Plan
from worker_svc.runner.step_runner import LoadedRunner

_NOTHING = np.empty(0, np.int64)
_NO_MOVES = BlockMoves(_NOTHING, _NOTHING)


@dataclass
class GuidedRow:
    """One sequence. It ends with a stop token, at `max_tokens` of output, or by a failure."""

    prompt: list[int]
    params: LogitsParams | None
    seed: int
    max_tokens: int
    # Output that it already has when it is admitted.
    output: list[int] = field(default_factory=list)
    temperature: float = 1.0
    failure: str | None = None
    stops: bool = True

    @property
    def is_finished(self) -> bool:
        """Whether it ended with a stop token."""
        if self.params is None or not self.stops or not self.output:
            return False
        return self.output[-1] in self.params.stop_token_ids

    @property
    def has_ended(self) -> bool:
        is_long = len(self.output) >= self.max_tokens
        return is_long or self.is_finished or self.failure is not None


class RowDriver:
    """The scheduler's part, for sequences that all fit at once."""

    def __init__(self, loaded: LoadedRunner) -> None:
        self._loaded = loaded
        self.num_steps = 0

    def run(self, rows: Sequence[GuidedRow], num_rounds: int = 1) -> None:
        """Until all have ended; then their rows are released. At most `max_num_seqs` rows."""
        self.start(rows)
        while any(not row.has_ended for row in rows):
            self.step(rows, num_rounds)
        self.finish(rows)

    def start(self, rows: Sequence[GuidedRow]) -> None:
        """Admit the rows, and compute their prompts one by one."""
        for index, row in enumerate(rows):
            token_ids = np.array([*row.prompt, *row.output])
            admission = self._admission(index, row, token_ids)
            plan = self._plan([index], [len(token_ids)], admissions=(admission,))
            self._launch(plan, rows)

    def step(self, rows: Sequence[GuidedRow], num_rounds: int = 1) -> None:
        """Sample a token in each row that has not ended."""
        live = [index for index, row in enumerate(rows) if not row.has_ended]
        rounds = [
            min(num_rounds, rows[index].max_tokens - len(rows[index].output)) for index in live
        ]
        several = np.array(rounds) if num_rounds > 1 else _NOTHING
        self._launch(self._plan(live, [1] * len(live), num_rounds=several), rows)

    def finish(self, rows: Sequence[GuidedRow]) -> None:
        released = np.arange(len(rows))
        self._loaded.runner.launch(self._plan([], [], released_rows=released)).output()

    def _launch(self, plan: Plan, rows: Sequence[GuidedRow]) -> None:
        self._loaded.on_arrival(plan)
        output = self._loaded.runner.launch(plan).output()
        self.num_steps += 1
        for index, token_id in zip(output.sampled_rows, output.sampled_token_ids, strict=True):
            # Later rounds of a plan go on after the end of a sequence.
            if not rows[index].has_ended:
                rows[index].output.append(token_id)
        for index, reason in output.failures.items():
            rows[index].failure = reason

    def _admission(self, index: int, row: GuidedRow, token_ids: "np.ndarray") -> Admission:
        block_size = self._loaded.identity.block_size
        num_blocks = -(-(len(row.prompt) + row.max_tokens + 1) // block_size)
        first = 1 + index * num_blocks
        return Admission(
            row=index,
            token_ids=token_ids,
            num_prompt_tokens=len(row.prompt),
            num_computed_tokens=0,
            block_ids=np.arange(first, first + num_blocks),
            temperature=row.temperature,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            seed=row.seed,
            num_logprobs=0,
            num_prompt_logprobs=0,
            logits_params=row.params,
        )

    def _plan(
        self,
        rows: list[int],
        counts: list[int],
        admissions: tuple[Admission, ...] = (),
        released_rows: "np.ndarray" = _NOTHING,
        num_rounds: "np.ndarray" = _NOTHING,
    ) -> Plan:
        return Plan(
            epoch=1,
            step=self.num_steps + 1,
            released_rows=released_rows,
            admissions=admissions,
            appends=(),
            swap_outs=_NO_MOVES,
            swap_ins=_NO_MOVES,
            copies=_NO_MOVES,
            rows=np.array(rows, np.int64),
            num_scheduled_tokens=np.array(counts, np.int64),
            num_rounds=num_rounds,
        )
