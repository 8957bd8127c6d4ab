"""Runs rows on a worker's runner, each with its own parameters, one token per step."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from worker_svc.plan.failures import RowFailure
from worker_svc.plan.inputs import Ints
from worker_svc.plan.logits_params import LogitsParams
from worker_svc.plan.plans import NO_APPENDS, Admission, BlockMoves, Plan, StepOutput
from worker_svc.runner.step_runner import LoadedRunner, PendingOutput

_NOTHING = np.empty(0, np.int64)
# Tokens that a row may get after its end.
_NUM_AHEAD = 8
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
    failure: RowFailure | None = None
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
    """The scheduler's part, with room for some rows at once."""

    def __init__(self, loaded: LoadedRunner, num_lookahead_tokens: int = 0) -> None:
        """Rows with grammars have the look-ahead."""
        self._loaded = loaded
        self._num_lookahead_tokens = num_lookahead_tokens
        self.num_steps = 0

    def run(self, rows: Sequence[GuidedRow], num_rounds: int = 1, at_once: int = 32) -> None:
        """Until all have ended. A row that ends makes room for the next one."""
        waiting = deque(rows)
        running: dict[int, GuidedRow] = {}
        while waiting or running:
            ended = [index for index, row in running.items() if row.has_ended]
            for index in ended:
                del running[index]
            if ended:
                self.release(ended)
            free = [index for index in range(at_once) if index not in running]
            for index in free[: len(waiting)]:
                running[index] = row = waiting.popleft()
                self.start(index, row)
            if any(not row.has_ended for row in running.values()):
                self.step(running, num_rounds)

    def start(
        self, index: int, row: GuidedRow, beside: Mapping[int, GuidedRow] | None = None
    ) -> None:
        """Admit a row, and compute its prompt, which gives its first token. The rows `beside` it
        sample one, too."""
        others = beside or {}
        token_ids = np.array([*row.prompt, *row.output])
        admission = self._admission(index, row, token_ids)
        counts = [len(token_ids), *[1] * len(others)]
        running = {index: row, **others}
        plan = self._plan(
            [*running], counts, admissions=(admission,), lookahead=self._lookahead(running)
        )
        self._launch(plan, running)

    def step(self, running: Mapping[int, GuidedRow], num_rounds: int = 1) -> None:
        """Sample a token in each row that has not ended."""
        live = {index: row for index, row in running.items() if not row.has_ended}
        rounds = [min(num_rounds, row.max_tokens - len(row.output)) for row in live.values()]
        several = np.array(rounds) if num_rounds > 1 else _NOTHING
        plan = self._plan(
            [*live], [1] * len(live), num_rounds=several, lookahead=self._lookahead(live)
        )
        self._launch(plan, live)

    def run_ahead(self, rows: Sequence[GuidedRow]) -> None:
        """As `run`, for rows that all fit at once; each step is launched before the output of the
        previous one is read."""
        running = dict(enumerate(rows))
        for index, row in running.items():
            self.start(index, row)
        launched = deque[PendingOutput[StepOutput]]()
        while any(not row.has_ended for row in rows):
            live = [index for index, row in running.items() if not row.has_ended]
            lookahead = self._lookahead({index: running[index] for index in live})
            plan = self._plan(live, [1] * len(live), lookahead=lookahead)
            launched.append(self._loaded.runner.launch(plan))
            self.num_steps += 1
            if len(launched) > 1:
                self._read(launched.popleft().output(), running)
        for each in launched:
            self._read(each.output(), running)
        self.release([*running])

    def release(self, indices: list[int]) -> None:
        plan = self._plan([], [], released_rows=np.array(indices))
        self._loaded.runner.launch(plan).output()

    def _lookahead(self, rows: Mapping[int, GuidedRow]) -> Ints:
        counts = [
            self._num_lookahead_tokens if row.params is not None and row.params.grammar else 0
            for row in rows.values()
        ]
        return np.array(counts) if any(counts) else _NOTHING

    def _launch(self, plan: Plan, rows: Mapping[int, GuidedRow]) -> None:
        self._loaded.on_arrival(plan)
        self.num_steps += 1
        self._read(self._loaded.runner.launch(plan).output(), rows)

    def _read(self, output: StepOutput, rows: Mapping[int, GuidedRow]) -> None:
        for index, token_id in zip(output.sampled_rows, output.sampled_token_ids, strict=True):
            # Steps and rounds that were launched before go on after the end of a sequence.
            if not rows[index].has_ended:
                rows[index].output.append(token_id)
        for index, failure in output.failures.items():
            rows[index].failure = failure

    def _admission(self, index: int, row: GuidedRow, token_ids: Ints) -> Admission:
        block_size = self._loaded.identity.block_size
        num_blocks = -(-(len(row.prompt) + row.max_tokens + _NUM_AHEAD) // block_size)
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
        released_rows: Ints = _NOTHING,
        num_rounds: Ints = _NOTHING,
        lookahead: Ints = _NOTHING,
    ) -> Plan:
        return Plan(
            epoch=1,
            step=self.num_steps + 1,
            released_rows=released_rows,
            admissions=admissions,
            appends=NO_APPENDS,
            swap_outs=_NO_MOVES,
            swap_ins=_NO_MOVES,
            copies=_NO_MOVES,
            rows=np.array(rows, np.int64),
            num_scheduled_tokens=np.array(counts, np.int64),
            num_rounds=num_rounds,
            num_lookahead_tokens=lookahead,
        )
