"""Runs plans on a GPU asynchronously: the host prepares a step while the device runs the previous.

The lengths of all sequences are known before their tokens, and inputs depend only on lengths. Token
ids that are still being sampled are filled in on the device.
"""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Final

import numpy as np
import torch
from torch import Tensor

from kernels.dispatch import Implementation
from kernels.sampling import NO_TOKEN, sample, token_logprobs
from worker_svc.cache.kv_pool import KvPool
from worker_svc.gpu.device_inputs import (
    Arrays,
    BlockChanges,
    ForwardInputs,
    PromptInputs,
    SamplingInputs,
    block_arrays,
    forward_arrays,
    prompt_arrays,
    sampling_arrays,
)
from worker_svc.gpu.device_pass import DevicePass
from worker_svc.gpu.host_tokens import HostTokens
from worker_svc.gpu.launched_step import EXCLUDED, LaunchedStep, StepEvents
from worker_svc.gpu.step_arrays import Followers, StepArrays
from worker_svc.gpu.streams import Streams
from worker_svc.logits.pipeline import LogitsPipeline
from worker_svc.plan.failures import RowFailure
from worker_svc.plan.inputs import Ints, StepInputs
from worker_svc.plan.jumps import lookahead_rows
from worker_svc.plan.plans import Plan, StepOutput
from worker_svc.plan.prompt_logprobs import PromptTargets
from worker_svc.plan.tables import RowTables
from worker_svc.runner.prompt_slices import prompt_logprobs
from worker_svc.runner.step_runner import Callback, PendingOutput, no_op
from worker_svc.runner.waiting_rows import rows_to_hold

_NONE: Final[Ints] = np.empty(0, np.int64)


class PipelinedRunner:
    """One model with its pool and tables. Not thread-safe: one thread launches all steps."""

    def __init__(
        self,
        device_pass: DevicePass,
        pool: KvPool,
        tables: RowTables,
        streams: Streams,
        processors: LogitsPipeline,
        implementation: Implementation,
        followers: Followers | None,
    ) -> None:
        """`implementation` is that of the sampler. `followers` are the other ranks of a worker,
        which run its passes."""
        self._forward = device_pass.forward
        self._model = device_pass.forward.model
        self._followers = followers
        self._pool = pool
        self._tables = tables
        self._staging = device_pass.staging
        self._streams = streams
        self._processors = processors
        self.host_tokens = HostTokens(processors)
        self._implementation = implementation
        self._ended = streams.record_event()
        self.last_finished_step = 0  # read by other threads

    @torch.inference_mode()
    def launch(self, plan: Plan, before_blocking: Callback = no_op) -> PendingOutput[StepOutput]:
        """Queue one plan on the device. An error leaves rows undefined until `clear`; the pool
        stays usable. `before_blocking` is called once, at the start."""
        before_blocking()
        launched_ns = time.monotonic_ns()
        before, began = self._ended, self._streams.record_event()
        tables = self._tables
        tables.apply(plan)
        self._fail(self._processors.change_rows(plan))
        self._pool.move(plan.swap_outs, plan.swap_ins, plan.copies)
        rows, num_scheduled_tokens, failures = tables.without_failed(plan)
        inputs = tables.prepare(rows, num_scheduled_tokens)
        held = rows_to_hold(plan, rows[inputs.sampling_mask], self._processors.unready)
        if held:
            inputs = inputs.without_sampling(np.isin(rows, held))
        self._pool.wait_for_swap_outs(inputs.slot_mapping)
        targets = tables.prompt_targets(rows, inputs)
        size = self._forward.graph_size(inputs.num_requests, inputs.num_tokens)
        if targets is not None:
            # A graph gives the logits of last tokens only.
            size = None
        with nullcontext() if self._followers is None else self._followers.in_step():
            forward_inputs, sampling, prompt = self._stage(plan, rows, inputs, targets, size)
            prepared = self._streams.record_event()
            logits, of_prompt = self._pass(forward_inputs, sampling, inputs, targets, prompt, size)
        forwarded = self._streams.record_event()
        sampled_rows = rows[inputs.sampling_mask]
        num_logprobs = tables.num_logprobs[sampled_rows]
        results: Sequence[Tensor] = [sampling.sampling_rows]  # empty
        if logits is not None and len(sampled_rows):
            described, failed = self._change(logits, sampling, sampled_rows)
            failures |= failed
            results = self._sample(
                logits, described, forward_inputs, sampling, sampled_rows, num_logprobs
            )
        self._ended = self._streams.record_event()
        tables.advance(rows, inputs.seq_lens)
        tables.hold_back(np.array(held, np.int64))
        tables.append_placeholder(sampled_rows)
        copies = self._streams.fetch([*results, *of_prompt])
        return LaunchedStep(
            plan=plan,
            launched_ns=launched_ns,
            events=StepEvents(before, began, prepared, forwarded, self._ended),
            sampling=sampled_rows,
            num_logprobs=num_logprobs,
            targets=targets,
            seq_lens={row: int(tables.num_computed_tokens[row]) for row in lookahead_rows(plan)},
            results=copies,
            failures=failures,
            exclusions=self._processors.exclusions(sampled_rows),
            host_tokens=self.host_tokens,
            number=self.host_tokens.add(sampled_rows, copies),
            on_finished=self._finished,
        )

    def clear(self) -> None:
        """Release all rows after the last launched step; blocks keep their contents."""
        self._streams.synchronize()
        self.host_tokens.clear()
        self._tables.clear()
        self._processors.clear()

    def _finished(self, step: int) -> None:
        self.last_finished_step = step

    def _fail(self, failures: dict[int, RowFailure]) -> dict[int, RowFailure]:
        for row, failure in failures.items():
            self._tables.fail(row, failure)
        return failures

    def _stage(
        self,
        plan: Plan,
        rows: Ints,
        inputs: StepInputs,
        targets: PromptTargets | None,
        size: int | None,
    ) -> tuple[ForwardInputs, SamplingInputs, dict[str, Tensor]]:
        """Copy the inputs to the device, and update its block table. The other ranks do so, too."""
        num_padding = 0 if size is None else size - len(rows)
        groups = (
            forward_arrays(rows, inputs, self._forward.padding_row, num_padding),
            sampling_arrays(rows, inputs, self._tables),
            block_arrays(plan, self._tables),
            prompt_arrays(targets),
        )
        if self._followers is not None:
            self._followers.send_step(_step_arrays(inputs, targets, size, groups[0], groups[2]))
        tensors = self._staging.send({k: v for group in groups for k, v in group.items()})
        of_forward, of_sampling, of_blocks, of_prompt = (
            {name: tensors[name] for name in group} for group in groups
        )
        self._forward.change_blocks(BlockChanges(**of_blocks))
        return ForwardInputs(**of_forward), SamplingInputs(**of_sampling), of_prompt

    def _pass(
        self,
        forward_inputs: ForwardInputs,
        sampling: SamplingInputs,
        inputs: StepInputs,
        targets: PromptTargets | None,
        staged: dict[str, Tensor],
        size: int | None,
    ) -> tuple[Tensor | None, Sequence[Tensor]]:
        """Logits of the rows that sample, and the results of `prompt_logprobs` if there are
        targets."""
        if targets is None:
            return self._logits(forward_inputs, sampling, inputs, size), ()
        return self._prompt_logits(forward_inputs, sampling, inputs, targets, staged)

    def _logits(
        self,
        forward_inputs: ForwardInputs,
        sampling: SamplingInputs,
        inputs: StepInputs,
        size: int | None,
    ) -> Tensor | None:
        """Logits of the rows that sample; None for a plan without tokens."""
        if not inputs.num_tokens:
            return None
        if size is not None:
            return self._forward.replay(size, inputs.num_requests, sampling.logits_indices)
        longest = int(inputs.seq_lens.max())
        return self._forward.launch(
            forward_inputs, sampling.logits_indices, inputs.max_query_len, longest
        )

    def _prompt_logits(
        self,
        forward_inputs: ForwardInputs,
        sampling: SamplingInputs,
        inputs: StepInputs,
        targets: PromptTargets,
        staged: dict[str, Tensor],
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Logits of the rows that sample, and the results of `prompt_logprobs`."""
        longest = int(inputs.seq_lens.max())
        final = self._forward.launch_states(forward_inputs, inputs.max_query_len, longest)
        prompt = PromptInputs(**staged)
        entries = prompt_logprobs(
            final,
            prompt.prompt_logits_indices,
            prompt.prompt_token_ids,
            targets.num_top,
            self._model.vocab_size,
            self._implementation,
        )
        logits = final.logits(sampling.logits_indices)
        return logits, [entries.token_ids, entries.logprobs, entries.ranks]

    def _change(
        self, logits: Tensor, sampling: SamplingInputs, rows: Ints
    ) -> tuple[Tensor | None, dict[int, RowFailure]]:
        """Change the logits of the rows that sample, in place. Returns the lines that
        log-probabilities describe, before or after the change, and the failing rows.

        Waits for the tokens of earlier steps if a processor needs them on the host. The device has
        the forward pass of this step to do meanwhile.
        """
        if self._processors.needs_token_ids(rows):
            self.host_tokens.read()
        described = None
        if len(sampling.logprob_indices):
            described = logits.index_select(0, sampling.logprob_indices)
        failures = self._fail(self._processors.apply(logits, rows))
        if described is not None and len(sampling.processed_lines):
            changed = logits.index_select(0, sampling.processed_lines)
            described.index_copy_(0, sampling.processed_indices, changed)
        self._processors.apply_typical_p(logits, rows)
        return described, failures

    def _sample(
        self,
        logits: Tensor,
        described: Tensor | None,
        forward_inputs: ForwardInputs,
        sampling: SamplingInputs,
        rows: Ints,
        num_logprobs: Ints,
    ) -> Sequence[Tensor]:
        """The token of each row that samples, and the results of `token_logprobs` for those that
        request them.

        The token is NO_TOKEN or EXCLUDED if the row failed in this step, or in an earlier one whose
        result had not arrived when this one was prepared.
        """
        tokens = sample(logits, sampling.params, implementation=self._implementation)
        if len(self._processors.changed(rows)):
            excluded = (tokens == NO_TOKEN) & (logits == float("-inf")).all(-1)
            tokens = tokens.masked_fill(excluded, EXCLUDED)
        last = forward_inputs.input_ids.index_select(0, sampling.logits_indices)
        tokens = torch.where(last < 0, last, tokens)
        self._forward.write_last_tokens(sampling.sampling_rows, tokens)
        self._processors.append_on_device(rows, tokens)
        if described is None:
            return [tokens]
        entries = token_logprobs(
            described,
            tokens.index_select(0, sampling.logprob_indices).clamp_min(0),
            min(int(num_logprobs.max()) - 1, logits.shape[1]),
            implementation=self._implementation,
        )
        return [tokens, entries.token_ids, entries.logprobs, entries.ranks]


def _step_arrays(
    inputs: StepInputs,
    targets: PromptTargets | None,
    size: int | None,
    of_forward: Arrays,
    of_blocks: Arrays,
) -> StepArrays:
    return StepArrays(
        forward=of_forward,
        blocks=of_blocks,
        logits_indices=inputs.logits_indices,
        prompt_indices=_NONE if targets is None else targets.logits_indices,
        num_tokens=inputs.num_tokens,
        graph_size=size or 0,
        max_query_len=inputs.max_query_len,
        max_seq_len=int(inputs.seq_lens.max(initial=0)),
    )
