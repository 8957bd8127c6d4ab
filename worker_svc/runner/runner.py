"""Runs plans synchronously: tables, inputs, forward pass, sampling."""

import time
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.attention import PagedBatch
from kernels.dispatch import Implementation
from kernels.sampling import NO_TOKEN as NO_TOKEN_ID
from kernels.sampling import SamplingTensors, sample, token_logprobs
from worker_svc.cache.kv_pool import KvPool
from worker_svc.logits.batch_cache import BatchCache
from worker_svc.logits.pipeline import LogitsPipeline
from worker_svc.model.paged_attention import PagedAttention
from worker_svc.model.served_model import FinalStates, ServedModel
from worker_svc.plan.failures import NO_TOKEN, RowFailure
from worker_svc.plan.inputs import Ints, StepInputs
from worker_svc.plan.jumps import jump
from worker_svc.plan.logprobs import Logprobs
from worker_svc.plan.plans import Plan, StepOutput, StepTimes
from worker_svc.plan.prompt_logprobs import PromptLogprobs, PromptTargets
from worker_svc.plan.tables import RowTables
from worker_svc.runner.prompt_slices import prompt_logprobs
from worker_svc.runner.step_runner import Callback, PendingOutput, ReadyOutput, no_op
from worker_svc.runner.waiting_rows import rows_to_hold

_NO_ROWS: Final[Ints] = np.empty(0, np.int64)


class Runner:
    """One model with its pool and tables. Not thread-safe: one thread runs all steps."""

    def __init__(
        self,
        model: ServedModel,
        pool: KvPool,
        attention: PagedAttention,
        tables: RowTables,
        processors: LogitsPipeline,
        implementation: Implementation | None = None,
    ) -> None:
        """`implementation` is that of the sampler; the default is the best one available."""
        self._model = model
        self._pool = pool
        self._attention = attention
        self._tables = tables
        self._processors = processors
        self._device = model.device
        self._is_on_host = model.device.type == "cpu"
        self._implementation = implementation
        # Sampling parameters of the last batch of rows. Those of a row change when it is admitted.
        self._columns = BatchCache(lambda _, rows: self._sampling_columns(rows))
        self._idle_since_ns = time.monotonic_ns()
        self.last_finished_step = 0  # read by other threads

    def launch(self, plan: Plan, before_blocking: Callback = no_op) -> PendingOutput[StepOutput]:
        """Run one plan to its end. `before_blocking` is called before blocks are moved and before
        the forward pass: both release the interpreter."""
        return ReadyOutput(self.run(plan, before_blocking))

    @torch.inference_mode()
    def run(self, plan: Plan, before_blocking: Callback = no_op) -> StepOutput:
        """Run one plan. An error leaves rows undefined until `clear`; the pool stays usable."""
        started_ns = time.monotonic_ns()
        idle_since_ns = self._idle_since_ns
        self._apply(plan, before_blocking)
        rows, counts, failures = self._tables.runnable(plan)
        inputs = self._tables.prepare(rows, counts)
        prepared_ns = time.monotonic_ns()
        logits, prompt = self._forward(inputs, rows, before_blocking)
        if prompt is not None:
            self._fail(dict.fromkeys(prompt.failing_rows, NO_TOKEN), failures)
        forwarded_ns = time.monotonic_ns()
        sampling, token_ids, logprobs = self._sample(plan, logits, rows, inputs, failures)
        processors = self._processors
        forced = processors.forced_rows(sampling)
        jumps = jump(plan, self._tables, forced, processors.forced_tokens)
        processors.begin_apply(sampling)
        ended_ns = time.monotonic_ns()
        self._idle_since_ns = ended_ns
        self.last_finished_step = plan.step
        output = StepOutput(
            sampled_rows=sampling.tolist(),
            sampled_token_ids=token_ids.tolist(),
            times=StepTimes(
                waiting_ns=started_ns - idle_since_ns,
                preparing_ns=prepared_ns - started_ns,
                forward_ns=forwarded_ns - prepared_ns,
                sampling_ns=ended_ns - forwarded_ns,
                starting_ns=started_ns - max(idle_since_ns, plan.arrived_ns),
            ),
            logprobs=logprobs,
            failures=failures,
            prompt_logprobs=prompt,
        )
        return jumps.add_to(output, plan, self._tables)

    def clear(self) -> None:
        """Release all rows; blocks keep their contents."""
        self._tables.clear()
        self._processors.clear()

    def _apply(self, plan: Plan, before_blocking: Callback) -> None:
        self._tables.apply(plan)
        if plan.admissions:
            self._columns.clear()
        for row, failure in self._processors.change_rows(plan).items():
            self._tables.fail(row, failure)
        if plan.moves_blocks:
            before_blocking()
            self._pool.move(plan.swap_outs, plan.swap_ins, plan.copies)

    def _forward(
        self, inputs: StepInputs, rows: Ints, before_blocking: Callback
    ) -> tuple[Tensor | None, PromptLogprobs | None]:
        """Logits of the rows that sample, float32 `[num_sampling, vocab_size]`, and the
        log-probabilities of prompt tokens, where rows request them."""
        if not inputs.num_tokens:
            return None, None
        batch = PagedBatch(
            block_table=self._tensor(self._tables.block_tables(rows, inputs.seq_lens)),
            query_start_loc=self._tensor(inputs.query_start_loc),
            seq_lens=self._tensor(inputs.seq_lens),
            block_size=self._pool.block_size,
        )
        self._pool.wait_for_swap_outs(inputs.slot_mapping)
        self._attention.set_batch(batch, self._tensor(inputs.slot_mapping))
        ids, positions, indices = (
            self._tensor(array)
            for array in (inputs.input_ids, inputs.positions, inputs.logits_indices)
        )
        targets = self._tables.prompt_targets(rows, inputs)
        before_blocking()
        prompt = None
        if targets is None:
            logits = self._model.logits(ids, positions, indices)
        else:
            final = self._model.final_states(ids, positions)
            prompt = self._prompt_logprobs(final, targets)
            logits = final.logits(indices)
        self._tables.advance(rows, inputs.seq_lens)
        return logits, prompt

    def _prompt_logprobs(self, final: FinalStates, targets: PromptTargets) -> PromptLogprobs:
        entries = prompt_logprobs(
            final,
            self._tensor(targets.logits_indices),
            self._tensor(targets.token_ids),
            targets.num_top,
            self._model.vocab_size,
            self._implementation,
        )
        arrays = (entries.token_ids, entries.logprobs, entries.ranks)
        return PromptLogprobs.pack(targets, *(tensor.cpu().numpy() for tensor in arrays))

    def _sample(
        self,
        plan: Plan,
        logits: Tensor | None,
        rows: Ints,
        inputs: StepInputs,
        failures: dict[int, RowFailure],
    ) -> tuple[Ints, Ints, Logprobs | None]:
        """Change the logits, sample, add failing rows to `failures`, and write the tokens into the
        table. Rows that have to wait are left out."""
        sampling = rows[inputs.sampling_mask]
        if logits is not None and (held := rows_to_hold(plan, sampling, self._processors.unready)):
            is_held = np.isin(sampling, held)
            self._tables.hold_back(sampling[is_held])
            sampling = sampling[~is_held]
            logits = logits[self._tensor((~is_held).nonzero()[0])]
        if logits is None or not logits.shape[0]:
            return _NO_ROWS, _NO_ROWS, None
        num_logprobs = self._tables.num_logprobs[sampling]
        described = self._change(logits, sampling, num_logprobs.nonzero()[0], failures)
        tokens = sample(logits, self._params(sampling), implementation=self._implementation)
        token_ids = tokens.cpu().numpy()
        valid = token_ids != NO_TOKEN_ID
        self._fail(self._without_token(logits, sampling, valid), failures)
        if failures:
            valid &= ~np.isin(sampling, list(failures))
        self._processors.append_on_device(sampling, tokens)
        logprobs = None
        if described is not None:
            logprobs = self._logprobs(described, tokens, num_logprobs, valid)
        if failures:
            sampling, token_ids = sampling[valid], token_ids[valid]
        self._processors.append_on_host(sampling, torch.from_numpy(token_ids))
        self._tables.write_sampled(sampling, token_ids)
        return sampling, token_ids, logprobs

    def _change(
        self, logits: Tensor, rows: Ints, asked: Ints, failures: dict[int, RowFailure]
    ) -> Tensor | None:
        """Change logits in place. Returns the lines that log-probabilities describe, of the rows
        at the indices `asked`, before or after the change; None if there are none."""
        described = logits[self._tensor(asked)] if len(asked) else None
        self._fail(self._processors.apply(logits, rows), failures)
        if described is not None:
            processed = self._tables.processed_logprobs[rows[asked]]
            if processed.any():
                changed = logits[self._tensor(asked[processed])]
                described[self._tensor(processed.nonzero()[0])] = changed
        self._processors.apply_typical_p(logits, rows)
        return described

    def _without_token(
        self, logits: Tensor, rows: Ints, valid: NDArray[np.bool_]
    ) -> dict[int, RowFailure]:
        """Why the rows without a token have none."""
        if valid.all():
            return {}
        failed = (~valid).nonzero()[0]
        excluded = (logits[self._tensor(failed)] == float("-inf")).all(-1).cpu().numpy()
        exclusions = self._processors.exclusions(rows[failed[excluded]])
        return {row: exclusions.get(row, NO_TOKEN) for row in rows[failed].tolist()}

    def _fail(self, new: dict[int, RowFailure], failures: dict[int, RowFailure]) -> None:
        """Add failures to `failures` that no row has yet."""
        for row, failure in new.items():
            if row not in failures:
                self._tables.fail(row, failure)
                failures[row] = failure

    def _params(self, rows: Ints) -> SamplingTensors:
        positions = self._tensor(self._tables.num_tokens[rows])
        return SamplingTensors(**self._columns.of(_NO_ROWS, rows), positions=positions)

    def _sampling_columns(self, rows: Ints) -> dict[str, Tensor]:
        """The fields of SamplingTensors but for the positions."""
        tables = self._tables
        columns: dict[str, NDArray[Any]] = {
            "temperatures": tables.temperatures,
            "top_ks": tables.top_ks,
            "top_ps": tables.top_ps,
            "min_ps": tables.min_ps,
            "seeds": tables.seeds.view(np.int64),
        }
        return {name: self._tensor(column[rows]) for name, column in columns.items()}

    def _logprobs(
        self, logits: Tensor, tokens: Tensor, num_logprobs: Ints, valid: NDArray[np.bool_]
    ) -> Logprobs | None:
        """Of the valid ones among the sampled tokens. `logits` has the lines of those that request
        any."""
        asked = num_logprobs.nonzero()[0]
        num_top = min(int(num_logprobs.max()) - 1, logits.shape[1])
        # A failed row's entries are left out below.
        chosen = tokens[self._tensor(asked)].clamp_min(0)
        entries = token_logprobs(logits, chosen, num_top, implementation=self._implementation)
        arrays = (entries.token_ids, entries.logprobs, entries.ranks)
        kept = valid[asked]
        if not kept.any():
            return None
        return Logprobs.pack(
            num_logprobs[valid], *(tensor.cpu().numpy()[kept] for tensor in arrays)
        )

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._is_on_host else tensor.to(self._device)
