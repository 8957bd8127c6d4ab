"""The logits processor of grammars."""

import os
from typing import Final

import structlog
from torch import Tensor

from kernels.logits import apply_bitmask
from quire.service.grammars import is_rejection, summary
from worker_svc.grammar.masks import TokenMasks
from worker_svc.grammar.row_grammar import RowGrammar
from worker_svc.logits.exclusions import REASON
from worker_svc.logits.processor import FailedRows, LogitsError, ProcessorContext
from worker_svc.plan.failures import InvalidField, RowFailure
from worker_svc.plan.inputs import Ints
from worker_svc.plan.logits_params import LogitsParams

log = structlog.get_logger()

_MAX_THREADS: Final = 8
_STOPPED: Final = RowFailure(
    "has all tokens with which the format of the output could go on, and stop tokens are no part "
    "of a format; leave them out",
    InvalidField("sampling_params.stop_token_ids", REASON),
)


class GrammarProcessor:
    """Excludes the tokens that the rows' grammars do not allow."""

    needs_token_ids = True

    def __init__(self, context: ProcessorContext) -> None:
        """Without a compiler of grammars, rows that have one fail."""
        self._context = context
        self._compiler = compiler = context.grammars
        self._rows: dict[int, RowGrammar] = {}
        self._fields: dict[int, str] = {}  # of the requests, which the grammars are made of
        if compiler is not None:
            cores = len(os.sched_getaffinity(0))
            self._masks = TokenMasks(
                compiler.vocabulary,
                context.vocab_size,
                context.max_num_seqs,
                min(cores, _MAX_THREADS),
            )

    def admit(
        self, row: int, params: LogitsParams, token_ids: Ints, num_prompt_tokens: int
    ) -> bool:
        if params.grammar is None:
            return False
        if self._compiler is None:
            raise LogitsError("the worker's model has no tokenizer for structured output")
        try:
            matcher = self._compiler.matcher(params.grammar.definition)
        except Exception as error:
            # Whatever the library raises fails this row alone.
            refused = InvalidField(params.grammar.field, "INVALID_FORMAT")
            raise LogitsError(f"is refused: {summary(error)}", refused) from error
        followed = RowGrammar(
            matcher,
            params.grammar.begins_after_token_ids,
            params.stop_token_ids.tolist(),
            self._compiler.vocabulary.end_id,
        )
        for token_id in token_ids[num_prompt_tokens:].tolist():
            followed.append(token_id)
        if followed.error is not None:
            failure = _failure(followed.error, params.grammar.field)
            raise LogitsError(failure.message, failure.invalid_field)
        self._rows[row] = followed
        self._fields[row] = params.grammar.field
        return True

    def release(self, row: int) -> None:
        del self._rows[row], self._fields[row]

    def append(self, token_ids: Tensor, lines: Ints, rows: Ints) -> None:
        sampled = token_ids.numpy()[lines].tolist()
        for row, token_id in zip(rows.tolist(), sampled, strict=True):
            self._rows[row].append(token_id)

    def apply(self, logits: Tensor, lines: Ints, rows: Ints) -> None:
        followed = [self._rows[row] for row in rows.tolist()]
        masks = self._masks.compute(followed)
        upload = self._context.upload
        apply_bitmask(
            logits, upload(masks), upload(lines), implementation=self._context.implementation
        )
        failures = {}
        for row, one in zip(rows.tolist(), followed, strict=True):
            if one.error is not None:
                failures[row] = _failure(one.error, self._fields[row])
            elif one.is_stopped:
                failures[row] = _STOPPED
        if failures:
            raise FailedRows(failures)

    def forced_token(self, row: int) -> int | None:
        """The next token of the row, where its grammar leaves no choice."""
        forced = self._rows[row].forced
        return forced[0] if forced else None


def _failure(error: str, field: str) -> RowFailure:
    """The failure of a row that the library does not continue."""
    if is_rejection(error):
        # Tokens are possible before they are sampled, so it is not the request.
        return RowFailure(f"the output does not follow the grammar: {summary(error)}")
    log.info("a row has reached a limit of the grammar library", field=field, reason=error)
    return RowFailure(
        "has reached a limit of the grammar library in the middle of the output: "
        f"{summary(error)}; make it simpler, for example with fewer optional properties",
        InvalidField(field, "FORMAT_TOO_COMPLEX"),
    )
