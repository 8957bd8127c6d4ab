"""The logits processors in their order, and the rows that each of them changes."""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker_svc.logits.processor import ForcingProcessor, LogitsError, LogitsProcessor
from worker_svc.logits.typical_p import TypicalP
from worker_svc.plan.inputs import Ints
from worker_svc.plan.plans import Admission, Plan

log = structlog.get_logger()

_NONE: Final[Ints] = np.empty(0, np.int64)


class LogitsPipeline:
    """Calls processors for the rows that they change. Other rows cost nothing.

    An error of a processor fails its rows and no others.
    """

    def __init__(
        self,
        processors: Sequence[LogitsProcessor],
        typical_p: TypicalP,
        max_num_seqs: int,
        own_names: frozenset[str] = frozenset(),
    ) -> None:
        """`own_names` are those by which requests may have arguments for a processor."""
        self._processors = tuple(processors)
        self._typical_p = typical_p
        self._own_names = own_names
        self._on_host = np.array([each.needs_token_ids for each in processors], bool)
        # Whether a processor changes a row.
        self._changes = np.zeros((len(processors), max_num_seqs), bool)
        self._has_work = False  # whether any row is changed
        self._num_releases = np.zeros(max_num_seqs, np.int64)  # of each row
        self._forcing = [
            (index, processor)
            for index, processor in enumerate(processors)
            if isinstance(processor, ForcingProcessor)
        ]

    def change_rows(self, plan: Plan) -> dict[int, str]:
        """Release and admit rows, as the tables do. The reasons of failing rows."""
        for row in plan.released_rows.tolist():
            self._release(row)
        failures = {}
        for admission in plan.admissions:
            reason = self._admit(admission)
            if reason is not None:
                failures[admission.row] = reason
        return failures

    def clear(self) -> None:
        """Release all rows."""
        for row in range(len(self._num_releases)):
            self._release(row)

    def changed(self, rows: Ints) -> Ints:
        """The indices of the rows that have a processor."""
        if not self._has_work:
            return _NONE
        return np.flatnonzero(np.any(self._changes[:, rows], axis=0))

    def needs_token_ids(self, rows: Ints) -> bool:
        """Whether `apply` needs the tokens of these rows on the host."""
        return bool(self._has_work and self._changes[self._on_host][:, rows].any())

    def apply(self, logits: Tensor, rows: Ints) -> dict[int, str]:
        """Change logits in place; line i is that of `rows[i]`. The reasons of failing rows."""
        failures: dict[int, str] = {}
        if not self._has_work:
            return failures
        for processor, changes in zip(self._processors, self._changes[:, rows], strict=True):
            lines = changes.nonzero()[0]
            if not len(lines):
                continue
            try:
                processor.apply(logits, lines, rows[lines])
            except Exception as error:
                reason = _reason(processor, error)
                failures.update(dict.fromkeys(rows[lines].tolist(), reason))
        return failures

    def apply_typical_p(self, logits: Tensor, rows: Ints) -> None:
        """Make tokens impossible that typical_p excludes, after `apply`."""
        self._typical_p.apply(logits, rows)

    def append_on_device(self, rows: Ints, token_ids: Tensor) -> None:
        """Add a sampled token to each row, for the processors that do not need it on the host.
        `token_ids` is int64 on the device, negative where a row failed."""
        self._append(False, rows, token_ids)

    def append_on_host(self, rows: Ints, token_ids: Tensor) -> None:
        """The same for the others: int64 on the host, of rows that did not fail."""
        self._append(True, rows, token_ids)

    def forced_tokens(self, row: int, most: int) -> Iterator[int]:
        """The tokens that must follow in a row, at most so many. Each is added to the row, as a
        sampled one is, before the next one is sought. None in rows of several processors."""
        forcing = [processor for index, processor in self._forcing if self._changes[index, row]]
        if self._changes[:, row].sum() > len(forcing):
            # Another processor may exclude the token.
            return
        rows = np.array([row])
        for _ in range(most):
            found = (processor.forced_token(row) for processor in forcing)
            token_id = next((one for one in found if one is not None), None)
            if token_id is None:
                return
            token_ids = torch.tensor([token_id])
            self.append_on_device(rows, token_ids)
            self.append_on_host(rows, token_ids)
            yield token_id

    def num_releases(self, rows: Ints) -> Ints:
        """How often each row has been released: a number of the sequence in it."""
        return self._num_releases[rows]

    def _append(self, on_host: bool, rows: Ints, token_ids: Tensor) -> None:
        if not self._has_work:
            return
        for processor, changes in zip(self._processors, self._changes[:, rows], strict=True):
            if processor.needs_token_ids == on_host and len(lines := changes.nonzero()[0]):
                processor.append(token_ids, lines, rows[lines])

    def _admit(self, admission: Admission) -> str | None:
        """The reason why the row fails, if it does."""
        row, params = admission.row, admission.logits_params
        if params is None:
            return None
        reason = None
        if unknown := sorted(params.processor_args.keys() - self._own_names):
            known = ", ".join(sorted(self._own_names)) or "none"
            reason = f"processor_args: the worker has no logits processor {unknown[0]} ({known})"
        self._typical_p.admit(row, admission.temperature, params.typical_p)
        for index, processor in enumerate(self._processors):
            try:
                self._changes[index, row] = processor.admit(
                    row, params, admission.token_ids, admission.num_prompt_tokens
                )
            except LogitsError as error:
                reason = str(error)
            except Exception as error:
                reason = _reason(processor, error)
        self._has_work = bool(self._changes.any())
        return reason

    def _release(self, row: int) -> None:
        self._num_releases[row] += 1
        self._typical_p.release(row)
        changes: NDArray[np.bool_] = self._changes[:, row]
        if changes.any():
            for index in changes.nonzero()[0].tolist():
                self._processors[index].release(row)
            changes[:] = False
            self._has_work = bool(self._changes.any())


def _reason(processor: LogitsProcessor, error: Exception) -> str:
    """Log an unexpected error of a processor."""
    name = type(processor).__name__
    log.exception("a logits processor failed", processor=name)
    return f"the logits processor {name} failed: {error}"
