"""Runs plans on a device that works while the host prepares the next one.

The host knows the lengths of all sequences before it knows their tokens, and inputs depend on
lengths alone: ids that are still being sampled are filled in on the device.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.choice import Implementation
from kernels.sampling import NO_TOKEN, sample, token_logprobs
from worker_svc.device_inputs import (
    BlockChanges,
    PassInputs,
    SamplingInputs,
    block_arrays,
    pass_arrays,
    sampling_arrays,
)
from worker_svc.device_pass import DevicePass
from worker_svc.inputs import Ints, StepInputs
from worker_svc.kv_pool import KvPool
from worker_svc.logprobs import Logprobs
from worker_svc.plans import NO_TOKEN_POSSIBLE, Plan, StepOutput, StepTimes
from worker_svc.staging import Staging
from worker_svc.step_runner import Launched, nothing
from worker_svc.streams import Fetched, Mark, Streams
from worker_svc.tables import Tables


class PipelinedRunner:
    """One model with its pool and tables. Not safe for threads: one of them launches all steps."""

    def __init__(
        self,
        device_pass: DevicePass,
        pool: KvPool,
        tables: Tables,
        staging: Staging,
        streams: Streams,
        implementation: Implementation | None = None,
    ) -> None:
        """`implementation` is that of the sampler; the best there is if absent."""
        self._pass = device_pass
        self._model = device_pass.model
        self._pool = pool
        self._tables = tables
        self._staging = staging
        self._streams = streams
        self._implementation = implementation
        self._ended = streams.mark()
        self.last_finished_step = 0  # read by other threads

    def run(self, plan: Plan) -> StepOutput:
        return self.launch(plan).output()

    @torch.inference_mode()
    def launch(self, plan: Plan, meanwhile: Callable[[], object] = nothing) -> Launched[StepOutput]:
        """Queues one plan on the device. An error leaves rows undefined until `clear`; the pool
        stays usable."""
        meanwhile()
        launched_ns = time.monotonic_ns()
        before, began = self._ended, self._streams.mark()
        tables, rows = self._tables, plan.rows
        tables.apply(plan)
        self._pool.move(plan.swap_outs, plan.swap_ins, plan.copies)
        inputs = tables.prepare(rows, plan.num_scheduled_tokens)
        self._pool.before_writing(inputs.slot_mapping)
        size = self._pass.graph_size(inputs.num_requests, inputs.num_tokens)
        pass_inputs, sampling = self._stage(plan, inputs, size)
        prepared = self._streams.mark()
        logits = self._logits(pass_inputs, sampling, inputs, size)
        forwarded = self._streams.mark()
        sampled_rows = rows[inputs.sampling]
        wanted = tables.num_logprobs[sampled_rows]
        results = self._sample(logits, pass_inputs, sampling, wanted)
        self._ended = self._streams.mark()
        tables.advance(rows, inputs.seq_lens)
        tables.expect_sampled(sampled_rows)
        return _LaunchedStep(
            self,
            plan,
            launched_ns,
            _Marks(before, began, prepared, forwarded, self._ended),
            sampled_rows,
            wanted,
            self._streams.fetch(results),
        )

    def clear(self) -> None:
        """Drops all rows when the device is done with them; blocks keep their contents."""
        self._streams.synchronize()
        self._tables.clear()

    def _stage(
        self, plan: Plan, inputs: StepInputs, size: int | None
    ) -> tuple[PassInputs, SamplingInputs]:
        """Copies the inputs to the device, and brings its block table up to date."""
        rows = plan.rows
        num_padding = 0 if size is None else size - len(rows)
        groups = (
            pass_arrays(rows, inputs, self._pass.spare_row, num_padding),
            sampling_arrays(rows, inputs, self._tables),
            block_arrays(plan, self._tables),
        )
        tensors = self._staging.send({k: v for group in groups for k, v in group.items()})
        of_pass, of_sampling, of_blocks = (
            {name: tensors[name] for name in group} for group in groups
        )
        self._pass.change_blocks(BlockChanges(**of_blocks))
        return PassInputs(**of_pass), SamplingInputs(**of_sampling)

    def _logits(
        self,
        pass_inputs: PassInputs,
        sampling: SamplingInputs,
        inputs: StepInputs,
        size: int | None,
    ) -> Tensor | None:
        """Of the rows that sample; None for a plan that runs nothing."""
        if not inputs.num_tokens:
            return None
        if size is not None:
            return self._pass.replay(size, inputs.num_requests, sampling.logits_indices)
        longest = int(inputs.seq_lens.max())
        return self._pass.launch(
            pass_inputs, sampling.logits_indices, inputs.max_query_len, longest
        )

    def _sample(
        self,
        logits: Tensor | None,
        pass_inputs: PassInputs,
        sampling: SamplingInputs,
        wanted: Ints,
    ) -> Sequence[Tensor]:
        """The token of each row that samples, and what `token_logprobs` gives for those that ask.

        NO_TOKEN stands for a row that failed, in this step or in one that the host had not heard
        of when it prepared this one.
        """
        if logits is None or not len(wanted):
            return [sampling.sampling_rows]  # of which there are none
        tokens = sample(logits, sampling.params, implementation=self._implementation)
        had_failed = pass_inputs.input_ids.index_select(0, sampling.logits_indices) < 0
        tokens = tokens.masked_fill(had_failed, NO_TOKEN)
        self._pass.write_newest(sampling.sampling_rows, tokens)
        if not len(sampling.asking):
            return [tokens]
        entries = token_logprobs(
            logits.index_select(0, sampling.asking),
            tokens.index_select(0, sampling.asking).clamp_min(0),
            min(int(wanted.max()) - 1, logits.shape[1]),
            implementation=self._implementation,
        )
        return [tokens, entries.token_ids, entries.logprobs, entries.ranks]


@dataclass(frozen=True)
class _Marks:
    """Moments of a step on the device."""

    before: Mark  # the end of the step before
    began: Mark
    prepared: Mark
    forwarded: Mark
    ended: Mark

    def times(self, known_ns: int) -> StepTimes:
        """`known_ns` is how long the plan had been there when it was launched."""
        waiting_ns = self.before.ns_until(self.began)
        return StepTimes(
            waiting_ns=waiting_ns,
            preparing_ns=self.began.ns_until(self.prepared),
            forward_ns=self.prepared.ns_until(self.forwarded),
            sampling_ns=self.forwarded.ns_until(self.ended),
            starting_ns=min(waiting_ns, known_ns),
        )


@dataclass(frozen=True)
class _LaunchedStep:
    """A step that is queued on the device."""

    runner: PipelinedRunner
    plan: Plan
    launched_ns: int
    marks: _Marks
    sampling: Ints  # rows
    wanted: Ints  # log-probabilities, per sampling row
    results: Fetched

    def is_ready(self) -> bool:
        return self.results.is_ready()

    def output(self) -> StepOutput:
        arrays = self.results.arrays()
        token_ids = arrays[0]
        drawn = token_ids != NO_TOKEN
        rows, wanted = self.sampling[drawn], self.wanted[drawn]
        failed = self.sampling[~drawn].tolist()
        logprobs = None
        if wanted.any():
            kept = drawn[self.wanted > 0]
            logprobs = Logprobs.pack(wanted, *(array[kept] for array in arrays[1:]))
        self.runner.last_finished_step = self.plan.step
        return StepOutput(
            sampled_rows=rows.tolist(),
            sampled_token_ids=token_ids[drawn].tolist(),
            times=self.marks.times(max(0, self.launched_ns - self.plan.arrived_ns)),
            logprobs=logprobs,
            failures=dict.fromkeys(failed, NO_TOKEN_POSSIBLE),
        )
