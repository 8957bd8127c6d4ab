"""A step on the device: what was queued, and its output."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from worker_svc.gpu.host_tokens import HostTokens
from worker_svc.gpu.streams import Event, PendingCopies
from worker_svc.plan.failures import NO_TOKEN, RowFailure
from worker_svc.plan.inputs import Ints
from worker_svc.plan.jumps import lookahead_rows
from worker_svc.plan.logprobs import Logprobs
from worker_svc.plan.plans import Plan, StepOutput, StepTimes
from worker_svc.plan.prompt_logprobs import PromptLogprobs, PromptTargets

# In place of a token, as NO_TOKEN: the logits were changed so that no token is possible.
EXCLUDED: Final = -2


@dataclass(frozen=True)
class StepEvents:
    """Events of a step on the device."""

    before: Event  # the end of the previous step
    began: Event
    prepared: Event
    forwarded: Event
    ended: Event

    def times(self, known_ns: int) -> StepTimes:
        """`known_ns` is the time from the plan's arrival to its launch."""
        waiting_ns = self.before.elapsed_ns(self.began)
        return StepTimes(
            waiting_ns=waiting_ns,
            preparing_ns=self.began.elapsed_ns(self.prepared),
            forward_ns=self.prepared.elapsed_ns(self.forwarded),
            sampling_ns=self.forwarded.elapsed_ns(self.ended),
            starting_ns=min(waiting_ns, known_ns),
        )


@dataclass(frozen=True)
class LaunchedStep:
    """A step that was queued on the device."""

    plan: Plan
    launched_ns: int
    events: StepEvents
    sampling: Ints  # rows
    num_logprobs: Ints  # per sampling row
    targets: PromptTargets | None
    seq_lens: dict[int, int]  # of rows with look-ahead: their computed tokens
    results: PendingCopies
    failures: dict[int, RowFailure]  # that were known when it was launched
    # Of the changed rows: the failure, should no token be possible.
    exclusions: dict[int, RowFailure]
    host_tokens: HostTokens
    number: int  # there
    on_finished: Callable[[int], object]  # called with the step

    def is_ready(self) -> bool:
        return self.results.is_ready()

    def output(self) -> StepOutput:
        arrays = self.results.arrays()
        prompt = None
        if self.targets is not None:
            *arrays, token_ids, logprobs, ranks = arrays
            prompt = PromptLogprobs.pack(self.targets, token_ids, logprobs, ranks)
        self.host_tokens.read(self.number)
        token_ids = arrays[0]
        valid = token_ids >= 0
        failures = dict(self.failures)
        if prompt is not None:
            failures |= dict.fromkeys(prompt.failing_rows, NO_TOKEN)
        for row, code in zip(self.sampling[~valid].tolist(), token_ids[~valid], strict=True):
            failure = self.exclusions.get(row, NO_TOKEN) if code == EXCLUDED else NO_TOKEN
            failures.setdefault(row, failure)
        if failures:
            valid &= ~np.isin(self.sampling, list(failures))
        rows, num_logprobs = self.sampling[valid], self.num_logprobs[valid]
        entries = None
        if num_logprobs.any():
            kept = valid[self.num_logprobs > 0]
            entries = Logprobs.pack(num_logprobs, *(array[kept] for array in arrays[1:]))
        self.on_finished(self.plan.step)
        # No row jumps: the lengths of the next step were needed before its tokens were known.
        lookahead = [row for row in lookahead_rows(self.plan) if row not in failures]
        return StepOutput(
            sampled_rows=rows.tolist(),
            sampled_token_ids=token_ids[valid].tolist(),
            times=self.events.times(max(0, self.launched_ns - self.plan.arrived_ns)),
            logprobs=entries,
            failures=failures,
            prompt_logprobs=prompt,
            lookahead_rows=lookahead,
            num_computed_tokens=[self.seq_lens[row] for row in lookahead],
        )
