"""The logits processors in their order, and the rows that each of them changes."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker_svc.logits.exclusions import no_possible_token, processor_args_field
from worker_svc.logits.processor import (
    FailedRows,
    ForcingProcessor,
    LogitsError,
    LogitsProcessor,
    OverlappingProcessor,
    PreparingProcessor,
)
from worker_svc.logits.typical_p import TypicalP
from worker_svc.plan.failures import InvalidField, RowFailure
from worker_svc.plan.inputs import Ints
from worker_svc.plan.logits_params import LogitsParams
from worker_svc.plan.plans import Admission, Plan

log = structlog.get_logger()

_NONE: Final[Ints] = np.empty(0, np.int64)


class _Work(NamedTuple):
    """What one processor changes among some rows."""

    number: int  # the index of the processor
    processor: LogitsProcessor
    lines: Ints  # the indices of the changed rows
    rows: Ints


class LogitsPipeline:
    """Calls processors for the rows that they change. Other rows cost nothing.

    An error of a processor fails its rows and no others. One of `release`, `unready`, `begin_apply`
    or `forced_token` is logged, and fails no row.
    """

    def __init__(
        self,
        processors: Sequence[LogitsProcessor],
        typical_p: TypicalP,
        max_num_seqs: int,
        own: Mapping[str, LogitsProcessor],
    ) -> None:
        """`own` come last; requests may have arguments for them by name."""
        self._processors = (*processors, *own.values())
        self._typical_p = typical_p
        # Names of own processors by index.
        self._own_names = dict(enumerate(own, len(processors)))
        self._on_host = np.array([each.needs_token_ids for each in self._processors], bool)
        # Whether a processor changes a row.
        self._changes = np.zeros((len(self._processors), max_num_seqs), bool)
        self._has_work = False  # whether any row is changed
        # Of the rows that are changed: the failure, should no token be possible.
        self._exclusions: dict[int, RowFailure] = {}
        # Of rows whose last tokens a processor did not take; `apply` reports them. No processor
        # sees these rows again before they are released.
        self._failed: dict[int, RowFailure] = {}
        self._num_releases = np.zeros(max_num_seqs, np.int64)  # of each row
        self._forcing = {
            index: processor
            for index, processor in enumerate(self._processors)
            if isinstance(processor, ForcingProcessor)
        }
        self._overlapping = {
            index: processor
            for index, processor in enumerate(self._processors)
            if isinstance(processor, OverlappingProcessor)
        }
        # The work of the last rows; None where rows were admitted or released since.
        self._last_work: tuple[bytes, list[_Work]] | None = None
        self._preparing = [one for one in self._processors if isinstance(one, PreparingProcessor)]

    def change_rows(self, plan: Plan) -> dict[int, RowFailure]:
        """Release and admit rows, as the tables do. The failing rows."""
        for row in plan.released_rows.tolist():
            self._release(row)
        failures = {}
        for admission in plan.admissions:
            failure = self._admit(admission)
            if failure is not None:
                failures[admission.row] = failure
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

    def exclusions(self, rows: Ints) -> dict[int, RowFailure]:
        """The failures of the changed ones of these rows, should no token be possible in them."""
        return {row: self._exclusions[row] for row in rows[self.changed(rows)].tolist()}

    def unready(self, rows: Ints, wait_s: float) -> list[int]:
        """Those of the rows that some processor has not prepared, after waiting for one of them for
        at most so long. Where a processor fails, its rows are ready; `apply` waits for them."""
        found: list[int] = []
        for each in self._preparing:
            try:
                found += each.unready(rows, wait_s)
            except Exception as error:
                _unexpected(each, error)
        return found

    def begin_apply(self, rows: Ints) -> None:
        """Start what can be done before the next step's logits are there, in which some or all of
        these rows sample again. An error is logged; `apply` follows all the same."""
        for number, processor, _, changed in self._work(rows):
            if (overlapping := self._overlapping.get(number)) is not None:
                try:
                    overlapping.begin_apply(changed)
                except Exception as error:
                    _unexpected(processor, error)

    def apply(self, logits: Tensor, rows: Ints) -> dict[int, RowFailure]:
        """Change logits in place; line i is that of `rows[i]`. The failing rows."""
        failures = {row: failure for row, failure in self._failed.items() if row in rows}
        for _, processor, lines, changed in self._work(rows):
            try:
                processor.apply(logits, lines, changed)
            except FailedRows as error:
                failures |= error.failures
            except Exception as error:
                failure = _unexpected(processor, error)
                failures |= dict.fromkeys(changed.tolist(), failure)
        return failures

    def apply_typical_p(self, logits: Tensor, rows: Ints) -> None:
        """Make tokens impossible that typical_p excludes, after `apply`."""
        self._typical_p.apply(logits, rows)

    def append_on_device(self, rows: Ints, token_ids: Tensor) -> None:
        """Add a sampled token to each row, for the processors that do not need it on the host.
        `token_ids` is int64 on the device, negative where a row failed. An error is reported by the
        rows' next `apply`."""
        self._append(False, rows, token_ids)

    def append_on_host(self, rows: Ints, token_ids: Tensor) -> None:
        """The same for the others: int64 on the host, of rows that did not fail."""
        self._append(True, rows, token_ids)

    def forced_rows(self, rows: Ints) -> Ints:
        """Those of the rows in which some processor leaves only one token."""
        changed = {
            row
            for number, _, _, changed in self._work(rows)
            if number in self._forcing
            for row in changed.tolist()
        }
        found = [row for row in changed if self._forced_token(row) is not None]
        return rows[np.isin(rows, found)] if found else _NONE

    def forced_tokens(self, row: int, most: int) -> Iterator[int]:
        """The tokens that must follow in a row, at most so many. Each is added to the row, as a
        sampled one is, before the next one is sought. None in rows of several processors."""
        if self._changes[:, row].sum() > self._changes[list(self._forcing), row].sum():
            # Another processor may exclude the token.
            return
        rows = np.array([row])
        for _ in range(most):
            token_id = self._forced_token(row)
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
        for _, processor, lines, changed in self._work(rows):
            if processor.needs_token_ids != on_host:
                continue
            try:
                processor.append(token_ids, lines, changed)
            except Exception as error:
                # Which of the rows have their token is not known.
                failure = _unexpected(processor, error)
                self._failed = dict.fromkeys(changed.tolist(), failure) | self._failed
                self._last_work = None

    def _forced_token(self, row: int) -> int | None:
        """The token that some processor leaves, unless one fails in this row or has failed."""
        if row in self._failed:
            return None
        found = None
        for index, processor in self._forcing.items():
            if not self._changes[index, row]:
                continue
            try:
                token_id = processor.forced_token(row)
            except Exception as error:
                _unexpected(processor, error)
                return None
            found = token_id if found is None else found
        return found

    def _work(self, rows: Ints) -> Sequence[_Work]:
        """Of the processors that change any of these rows, in order. Most calls have the rows of
        the call before."""
        if not self._has_work:
            return ()
        key = rows.tobytes()
        if self._last_work is None or self._last_work[0] != key:
            changed = self._changes[:, rows] & ~np.isin(rows, list(self._failed))
            lines = [changes.nonzero()[0] for changes in changed]
            work = [
                _Work(index, self._processors[index], each, rows[each])
                for index, each in enumerate(lines)
                if len(each)
            ]
            self._last_work = key, work
        return self._last_work[1]

    def _own_changes(self, row: int) -> list[str]:
        """The names of own processors that change a row."""
        return [name for index, name in self._own_names.items() if self._changes[index, row]]

    def _admit(self, admission: Admission) -> RowFailure | None:
        """Why the row fails, if it does."""
        row, params = admission.row, admission.logits_params
        if params is None:
            return None
        self._last_work = None
        failure = self._unknown_args(params)
        self._typical_p.admit(row, admission.temperature, params.typical_p)
        for index, processor in enumerate(self._processors):
            try:
                self._changes[index, row] = processor.admit(
                    row, params, admission.token_ids, admission.num_prompt_tokens
                )
            except Exception as error:
                failure = failure or self._refusal(index, params, error)
        if self._changes[:, row].any():
            self._has_work = True
            self._exclusions[row] = no_possible_token(params, self._own_changes(row))
        return failure

    def _unknown_args(self, params: LogitsParams) -> RowFailure | None:
        """The failure of arguments for a processor that is not loaded."""
        unknown = sorted(params.processor_args.keys() - self._own_names.values())
        if not unknown:
            return None
        known = ", ".join(sorted(self._own_names.values())) or "none"
        return RowFailure(
            f"names a logits processor that the worker does not have; it has: {known}",
            InvalidField(processor_args_field(unknown[0]), "UNKNOWN_PROCESSOR"),
        )

    def _refusal(self, index: int, params: LogitsParams, error: Exception) -> RowFailure:
        """The failure of a row that a processor has not admitted. An own processor's arguments are
        the only part of a request that it reads, so they are at fault."""
        name = self._own_names.get(index)
        is_expected = isinstance(error, LogitsError)
        if name is None or name not in params.processor_args:
            if is_expected:
                return RowFailure(str(error))
            return _unexpected(self._processors[index], error)
        reason = str(error) if is_expected else f"{type(error).__name__}: {error}"
        log.warning("a logits processor refuses its arguments", processor=name, exc_info=error)
        return RowFailure(
            f"is refused by the logits processor: {reason}",
            InvalidField(processor_args_field(name), "INVALID_PROCESSOR_ARGS"),
        )

    def _release(self, row: int) -> None:
        self._num_releases[row] += 1
        self._typical_p.release(row)
        changes: NDArray[np.bool_] = self._changes[:, row]
        if changes.any():
            self._last_work = None
            for index in changes.nonzero()[0].tolist():
                try:
                    self._processors[index].release(row)
                except Exception as error:
                    _unexpected(self._processors[index], error)
            changes[:] = False
            self._failed.pop(row, None)
            del self._exclusions[row]
            self._has_work = bool(self._changes.any())


def _unexpected(processor: object, error: Exception) -> RowFailure:
    """Log an unexpected error of a processor."""
    name = type(processor).__name__
    log.error("a logits processor failed", processor=name, exc_info=error)
    return RowFailure(f"the logits processor {name} failed: {error}")
