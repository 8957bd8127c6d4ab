"""Samples one token of each row: changed logits, a token, its log-probabilities."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.dispatch import Implementation
from kernels.sampling import NO_TOKEN as NO_TOKEN_ID
from kernels.sampling import sample, token_logprobs
from worker_svc.logits.pipeline import LogitsPipeline
from worker_svc.plan.failures import NO_TOKEN, RowFailure
from worker_svc.plan.inputs import Ints
from worker_svc.plan.logprobs import Logprobs
from worker_svc.plan.tables import RowTables
from worker_svc.runner.host_arrays import tensors_on
from worker_svc.runner.sampling_params import SamplingParams


@dataclass(frozen=True)
class SampledTokens:
    """A token of each row, of those that did not fail."""

    is_valid: NDArray[np.bool_]  # of each row that was to be sampled
    rows: Ints
    token_ids: Ints
    logprobs: Logprobs | None  # None where no row requests any
    failures: dict[int, RowFailure]  # of this call


class RowSampler:
    """Changes logits by the rows' processors, samples, and appends the tokens to the rows."""

    def __init__(
        self,
        tables: RowTables,
        processors: LogitsPipeline,
        device: torch.device,
        implementation: Implementation,
    ) -> None:
        self._tables = tables
        self._processors = processors
        self._tensor = tensors_on(device)
        self._implementation = implementation
        self._params = SamplingParams(tables, device)

    def rows_have_changed(self) -> None:
        """To be called when rows were admitted."""
        self._params.rows_have_changed()

    def sample(self, logits: Tensor, rows: Ints, failed: Collection[int]) -> SampledTokens:
        """Line i of `logits`, which change, is that of `rows[i]`, at the row's next position. Rows
        that have `failed` get no token."""
        num_logprobs = self._tables.num_logprobs[rows]
        described, failures = self._change(logits, rows, num_logprobs.nonzero()[0])
        params = self._params.of(rows, self._tables.num_tokens[rows])
        tokens = sample(logits, params, implementation=self._implementation)
        token_ids = tokens.cpu().numpy()
        is_valid = token_ids != NO_TOKEN_ID
        for row, failure in self._without_token(logits, rows, is_valid).items():
            failures.setdefault(row, failure)
        if failures or failed:
            is_valid &= ~np.isin(rows, [*failures, *failed])
        self._processors.append_on_device(rows, tokens)
        logprobs = None
        if described is not None:
            logprobs = self._logprobs(described, tokens, num_logprobs, is_valid)
        if failures or failed:
            rows, token_ids = rows[is_valid], token_ids[is_valid]
        self._processors.append_on_host(rows, torch.from_numpy(token_ids))
        self._tables.write_sampled(rows, token_ids)
        return SampledTokens(is_valid, rows, token_ids, logprobs, failures)

    def _change(
        self, logits: Tensor, rows: Ints, asked: Ints
    ) -> tuple[Tensor | None, dict[int, RowFailure]]:
        """Change logits in place. Returns the lines that log-probabilities describe, of the rows
        at the indices `asked`, before or after the change; None if there are none. With the rows
        that fail."""
        described = logits[self._tensor(asked)] if len(asked) else None
        failures = self._processors.apply(logits, rows)
        if described is not None:
            processed = self._tables.processed_logprobs[rows[asked]]
            if processed.any():
                changed = logits[self._tensor(asked[processed])]
                described[self._tensor(processed.nonzero()[0])] = changed
        self._processors.apply_typical_p(logits, rows)
        return described, failures

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
