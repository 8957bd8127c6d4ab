"""The logits processors in their order, and the rows that each of them changes."""

from collections.abc import Iterator, Sequence

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker_svc.logits.processor import ForcingProcessor, LogitsError, LogitsProcessor
from worker_svc.plan.inputs import Ints
from worker_svc.plan.plans import Admission, Plan

log = structlog.get_logger()


class LogitsPipeline:
    """Calls processors for the rows that they change. Other rows cost nothing.

    An error of a processor fails its rows and no others.
    """

    def __init__(self, processors: Sequence[LogitsProcessor], max_num_seqs: int) -> None:
        self._processors = tuple(processors)
        self._on_host = np.array([each.needs_token_ids for each in processors], bool)
        # Whether a processor changes a row.
        self._changes = np.zeros((len(processors), max_num_seqs), bool)
        self._num_changed = 0  # rows
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
            if admission.logits_params is not None:
                try:
                    self._admit(admission)
                except LogitsError as error:
                    failures[admission.row] = str(error)
        return failures

    def clear(self) -> None:
        """Release all rows."""
        for row in _columns(self._changes).tolist():
            self._release(row)

    def changed(self, rows: Ints) -> Ints:
        """The indices of the rows whose logits are changed."""
        if not self._num_changed:
            return _NONE
        return _columns(self._changes[:, rows])

    def needs_token_ids(self, rows: Ints) -> bool:
        """Whether `apply` needs the tokens of these rows on the host."""
        return bool(self._num_changed and self._changes[self._on_host][:, rows].any())

    def apply(self, logits: Tensor, rows: Ints) -> dict[int, str]:
        """Change logits in place; line i is that of `rows[i]`. The reasons of failing rows."""
        failures: dict[int, str] = {}
        if not self._num_changed:
            return failures
        for processor, changes in zip(self._processors, self._changes[:, rows], strict=True):
            lines = changes.nonzero()[0]
            if not len(lines):
                continue
            try:
                processor.apply(logits, lines, rows[lines])
            except Exception as error:
                name = type(processor).__name__
                log.exception("a logits processor failed", processor=name)
                reason = f"the logits processor {name} failed: {error}"
                failures.update(dict.fromkeys(rows[lines].tolist(), reason))
        return failures

    def append_on_device(self, rows: Ints, token_ids: Tensor) -> None:
        """Add a sampled token to each row, for the processors that do not need it on the host.
        `token_ids` is int64 on the device, negative where a row failed."""
        self._append(False, rows, token_ids)

    def append_on_host(self, rows: Ints, token_ids: Tensor) -> None:
        """The same for the others: int64 on the host, of rows that did not fail."""
        self._append(True, rows, token_ids)

    def forced_tokens(self, row: int, most: int) -> Iterator[int]:
        """The tokens that must follow in a row, at most so many. Each is added to the row, as a
        sampled one is, before the next one is sought."""
        forcing = [processor for index, processor in self._forcing if self._changes[index, row]]
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

    def _append(self, on_host: bool, rows: Ints, token_ids: Tensor) -> None:
        if not self._num_changed:
            return
        for processor, changes in zip(self._processors, self._changes[:, rows], strict=True):
            if processor.needs_token_ids == on_host and len(lines := changes.nonzero()[0]):
                processor.append(token_ids, lines, rows[lines])

    def _admit(self, admission: Admission) -> None:
        row, params = admission.row, admission.logits_params
        assert params is not None
        arguments = (row, params, admission.token_ids, admission.num_prompt_tokens)
        for index, processor in enumerate(self._processors):
            if processor.admit(*arguments):
                if not self._changes[:, row].any():
                    self._num_changed += 1
                self._changes[index, row] = True

    def _release(self, row: int) -> None:
        changes = self._changes[:, row]
        if changes.any():
            self._num_changed -= 1
        for index in changes.nonzero()[0].tolist():
            self._processors[index].release(row)
        changes[:] = False


_NONE: Ints = np.empty(0, np.int64)


def _columns(changes: NDArray[np.bool_]) -> Ints:
    """The columns that have a True."""
    return np.flatnonzero(np.any(changes, axis=0))
