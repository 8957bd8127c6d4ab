"""Runs plans, one after the other: tables, inputs, forward pass, sampling."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.attention import PagedBatch
from kernels.choice import Implementation
from kernels.sampling import NO_TOKEN, RowParams, sample, token_logprobs
from worker_svc.attention import PagedAttention
from worker_svc.inputs import Ints, StepInputs
from worker_svc.kv_pool import KvPool
from worker_svc.logprobs import Logprobs
from worker_svc.model import LoadedModel
from worker_svc.plans import NO_TOKEN_POSSIBLE, Plan, StepOutput, StepTimes
from worker_svc.step_runner import Finished, Launched, nothing
from worker_svc.tables import Tables


class Runner:
    """One model with its pool and tables. Not safe for threads: one of them runs all steps."""

    def __init__(
        self,
        model: LoadedModel,
        pool: KvPool,
        attention: PagedAttention,
        tables: Tables,
        implementation: Implementation | None = None,
    ) -> None:
        """`implementation` is that of the sampler; the best there is if absent."""
        self._model = model
        self._pool = pool
        self._attention = attention
        self._tables = tables
        self._device = model.device
        self._is_on_host = model.device.type == "cpu"
        self._implementation = implementation
        self._idle_since_ns = time.monotonic_ns()
        self.last_finished_step = 0  # read by other threads

    def launch(self, plan: Plan, meanwhile: Callable[[], object] = nothing) -> Launched[StepOutput]:
        """Runs one plan to its end."""
        return Finished(self.run(plan, meanwhile))

    @torch.inference_mode()
    def run(self, plan: Plan, meanwhile: Callable[[], object] = nothing) -> StepOutput:
        """Runs one plan. An error leaves rows undefined until `clear`; the pool stays usable."""
        started_ns = time.monotonic_ns()
        idle_since_ns = self._idle_since_ns
        self._apply(plan, meanwhile)
        rows, counts, failures = self._tables.without_failed(plan)
        inputs = self._tables.prepare(rows, counts)
        prepared_ns = time.monotonic_ns()
        logits = self._forward(inputs, rows, meanwhile) if inputs.num_tokens else None
        forwarded_ns = time.monotonic_ns()
        sampled_rows, token_ids, logprobs = self._sample(logits, rows, inputs, failures)
        ended_ns = time.monotonic_ns()
        self._idle_since_ns = ended_ns
        self.last_finished_step = plan.step
        return StepOutput(
            sampled_rows=sampled_rows,
            sampled_token_ids=token_ids,
            times=StepTimes(
                waiting_ns=started_ns - idle_since_ns,
                preparing_ns=prepared_ns - started_ns,
                forward_ns=forwarded_ns - prepared_ns,
                sampling_ns=ended_ns - forwarded_ns,
                starting_ns=started_ns - max(idle_since_ns, plan.arrived_ns),
            ),
            logprobs=logprobs,
            failures=failures,
        )

    def clear(self) -> None:
        """Drops all rows; blocks keep their contents."""
        self._tables.clear()

    def _apply(self, plan: Plan, meanwhile: Callable[[], object]) -> None:
        self._tables.apply(plan)
        if plan.moves_blocks:
            meanwhile()
            self._pool.move(plan.swap_outs, plan.swap_ins, plan.copies)

    def _forward(self, inputs: StepInputs, rows: Ints, meanwhile: Callable[[], object]) -> Tensor:
        """Logits of the rows that sample: float32 `[num_sampling, vocab_size]`."""
        batch = PagedBatch(
            block_table=self._tensor(self._tables.block_tables(rows, inputs.seq_lens)),
            query_start_loc=self._tensor(inputs.query_start_loc),
            seq_lens=self._tensor(inputs.seq_lens),
            block_size=self._pool.block_size,
        )
        self._pool.before_writing(inputs.slot_mapping)
        self._attention.begin(batch, self._tensor(inputs.slot_mapping))
        ids, positions, indices = (
            self._tensor(array)
            for array in (inputs.input_ids, inputs.positions, inputs.logits_indices)
        )
        meanwhile()
        logits = self._model.logits(ids, positions, indices)
        self._tables.advance(rows, inputs.seq_lens)
        return logits

    def _sample(
        self, logits: Tensor | None, rows: Ints, inputs: StepInputs, failures: dict[int, str]
    ) -> tuple[list[int], list[int], Logprobs | None]:
        """Samples, notes failing rows in `failures`, and writes the tokens into the table."""
        if logits is None or not logits.shape[0]:
            return [], [], None
        sampling = rows[inputs.sampling]
        tokens = sample(logits, self._params(sampling), implementation=self._implementation)
        token_ids = tokens.cpu().numpy()
        drawn = token_ids != NO_TOKEN
        if not drawn.all():
            for row in sampling[~drawn].tolist():
                self._tables.fail(row, NO_TOKEN_POSSIBLE)
                failures[row] = NO_TOKEN_POSSIBLE
            kept = self._tensor(drawn)
            sampling, token_ids = sampling[drawn], token_ids[drawn]
            logits, tokens = logits[kept], tokens[kept]
        self._tables.write_sampled(sampling, token_ids)
        logprobs = self._logprobs(logits, tokens, sampling)
        return sampling.tolist(), token_ids.tolist(), logprobs

    def _params(self, rows: Ints) -> RowParams:
        tables = self._tables
        return RowParams(
            temperatures=self._tensor(tables.temperatures[rows]),
            top_ks=self._tensor(tables.top_ks[rows]),
            top_ps=self._tensor(tables.top_ps[rows]),
            min_ps=self._tensor(tables.min_ps[rows]),
            seeds=self._tensor(tables.seeds[rows].view(np.int64)),
            positions=self._tensor(tables.num_tokens[rows]),
        )

    def _logprobs(self, logits: Tensor, tokens: Tensor, rows: Ints) -> Logprobs | None:
        """None if no row asked."""
        wanted = self._tables.num_logprobs[rows]
        asking = wanted.nonzero()[0]
        if not len(asking):
            return None
        index = self._tensor(asking)
        num_top = min(int(wanted.max()) - 1, logits.shape[1])
        entries = token_logprobs(
            logits[index], tokens[index], num_top, implementation=self._implementation
        )
        arrays = (entries.token_ids, entries.logprobs, entries.ranks)
        return Logprobs.pack(wanted, *(tensor.cpu().numpy() for tensor in arrays))

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._is_on_host else tensor.to(self._device)
