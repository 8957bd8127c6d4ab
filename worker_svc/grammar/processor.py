"""The logits processor of grammars."""

import os
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Final

import numpy as np
import structlog
from llguidance import LLMatcher
from torch import Tensor

from kernels.logits import apply_bitmask
from quire.service.grammars import has_too_many_states, is_rejection, summary
from worker_svc.grammar.beside import BesideThread
from worker_svc.grammar.masks import Bits, MaskWork, TokenMasks
from worker_svc.grammar.row_grammar import RowGrammar
from worker_svc.logits.exclusions import REASON
from worker_svc.logits.processor import FailedRows, LogitsError, ProcessorContext
from worker_svc.plan.failures import InvalidField, RowFailure
from worker_svc.plan.inputs import Ints
from worker_svc.plan.logits_params import Grammar, LogitsParams

log = structlog.get_logger()

_MAX_THREADS: Final = 8
_NO_TOKENIZER: Final = "the worker's model has no tokenizer for structured output"
_STOPPED: Final = (
    "has all tokens with which the format of the output could go on, and stop tokens are no part "
    "of a format; leave them out"
)
_STOP_TOKENS: Final = InvalidField("sampling_params.stop_token_ids", REASON)


@dataclass(frozen=True)
class _BeginningRow:
    """A row that follows its grammar from here on; the grammar may still be compiled."""

    grammar: Grammar
    stop_token_ids: Ints
    output: list[int]
    compiled: Future[LLMatcher]
    # The compiled grammar is that of this row alone.
    is_alone: bool = False

    def begin(self, end_id: int) -> RowGrammar:
        """Follow the grammar through the output so far. Waits until it is compiled, and raises what
        the library does."""
        followed = RowGrammar(
            self.compiled.result().deep_copy(),
            self.grammar.begins_after_token_ids,
            self.stop_token_ids.tolist(),
            end_id,
        )
        for token_id in self.output:
            followed.append(token_id)
        return followed


class GrammarProcessor:
    """Excludes the tokens that the rows' grammars do not allow."""

    needs_token_ids = True

    def __init__(self, context: ProcessorContext) -> None:
        """Without a compiler of grammars, rows that have one fail."""
        self._context = context
        self._compiler = context.grammars
        # Rows whose grammars are compiled, and those that wait for it.
        self._rows: dict[int, RowGrammar] = {}
        self._waiting: set[int] = set()
        # All of them, as they have begun or will.
        self._beginnings: dict[int, _BeginningRow] = {}
        self._thread = BesideThread("grammar-masks")
        # Masks that this thread computes, with the rows' numbers.
        self._begun: tuple[list[int], MaskWork] | None = None

    @cached_property
    def _masks(self) -> TokenMasks:
        """Made for the first row."""
        assert self._compiler is not None
        cores = len(os.sched_getaffinity(0))
        return TokenMasks(
            self._compiler.vocabulary,
            self._context.vocab_size,
            self._context.max_num_seqs,
            max(1, min(cores - 1, _MAX_THREADS)),
        )

    def admit(
        self, row: int, params: LogitsParams, token_ids: Ints, num_prompt_tokens: int
    ) -> bool:
        if params.grammar is None:
            return False
        if self._compiler is None:
            raise LogitsError(_NO_TOKENIZER)
        compiled = self._compiler.prepare(params.grammar)
        output = token_ids[num_prompt_tokens:].tolist()
        self._beginnings[row] = _BeginningRow(
            params.grammar, params.stop_token_ids, output, compiled
        )
        self._waiting.add(row)
        return True

    def release(self, row: int) -> None:
        self._rows.pop(row, None)
        self._waiting.discard(row)
        del self._beginnings[row]
        # Last: an error of the thread must not keep the row.
        self._drop_masks()

    def unready(self, rows: Ints, wait_s: float) -> list[int]:
        """Rows whose grammars are not compiled yet."""
        if not self._waiting:
            return []
        waiting = [row for row in rows.tolist() if row in self._waiting]
        if waiting and wait_s:
            wait([self._beginnings[row].compiled for row in waiting], wait_s, FIRST_COMPLETED)
        return [row for row in waiting if not self._beginnings[row].compiled.done()]

    def append(self, token_ids: Tensor, lines: Ints, rows: Ints) -> None:
        sampled = token_ids.numpy()[lines].tolist()
        for row, token_id in zip(rows.tolist(), sampled, strict=True):
            if row in self._rows:  # else it has failed
                self._rows[row].append(token_id)

    def begin_apply(self, rows: Ints) -> None:
        """Start the masks of rows whose grammars are compiled."""
        self._drop_masks()
        ready = [row for row in rows.tolist() if row in self._rows]
        if ready:
            work = self._masks.plan([self._rows[row] for row in ready])
            self._thread.begin(partial(self._masks.fill, work))
            self._begun = ready, work

    def apply(self, logits: Tensor, lines: Ints, rows: Ints) -> None:
        begun = self._join(rows.tolist())
        failures = self._begin_waiting(rows)
        if failures:
            going_on = ~np.isin(rows, list(failures))
            lines, rows = lines[going_on], rows[going_on]
        followed = [self._rows[row] for row in rows.tolist()]
        if followed:
            masks = self._masks.compute(followed) if begun is None else begun
            while self._begin_alone(rows):
                followed = [self._rows[row] for row in rows.tolist()]
                masks = self._masks.compute(followed)
            upload = self._context.upload
            apply_bitmask(
                logits, upload(masks), upload(lines), implementation=self._context.implementation
            )
        for row, one in zip(rows.tolist(), followed, strict=True):
            if one.error is not None:
                failures[row] = _failure(one.error, self._field(row))
            elif one.stopped_by is not None:
                failures[row] = self._stopped(one.stopped_by, self._field(row))
        if failures:
            raise FailedRows(failures)

    def _join(self, rows: list[int]) -> Bits | None:
        """The masks of these rows, if all were begun."""
        if self._begun is None:
            return None
        begun, work = self._begun
        self._drop_masks()
        if rows == begun:
            return self._masks.complete(work)
        lines = {row: line for line, row in enumerate(begun)}
        if not lines.keys() >= {*rows}:
            return None
        return self._masks.complete(work)[[lines[row] for row in rows]]

    def _drop_masks(self) -> None:
        """Forget masks that were begun for a step that has failed or comes without these rows."""
        if self._begun is not None:
            self._begun = None
            self._thread.join()

    def _begin_waiting(self, rows: Ints) -> dict[int, RowFailure]:
        """Begin with the rows that wait, once their grammars are compiled. The failing rows."""
        failures: dict[int, RowFailure] = {}
        for row in rows.tolist() if self._waiting else ():
            if row not in self._waiting:
                continue
            try:
                self._rows[row] = self._beginnings[row].begin(self._masks.end_id)
                self._waiting.remove(row)
            except Exception as error:
                # Whatever the library raises fails this row alone.
                refused = InvalidField(self._field(row), "INVALID_FORMAT")
                failures[row] = RowFailure(f"is refused: {summary(error)}", refused)
        return failures

    def _begin_alone(self, rows: Ints) -> bool:
        """Begin again, with grammars of their own, where rows have no room for a state in the lexer
        that they share: most of its states are those of other outputs. Whether any has begun."""
        assert self._compiler is not None
        begun = {}
        for row in rows.tolist():
            one, shared = self._rows[row], self._beginnings[row]
            if one.error is not None and has_too_many_states(one.error) and not shared.is_alone:
                own = self._compiler.prepare_alone(shared.grammar.definition, shared.compiled)
                begun[row] = replace(shared, output=one.token_ids, compiled=own, is_alone=True)
        for row, alone in begun.items():
            self._beginnings[row] = alone
            self._rows[row] = alone.begin(self._masks.end_id)
        return bool(begun)

    def _field(self, row: int) -> str:
        """The field of the request that the grammar is made of."""
        return self._beginnings[row].grammar.field

    def _stopped(self, token_id: int, field: str) -> RowFailure:
        """The failure of a row whose format goes on with this stop token. The model's own ones are
        special tokens, which a format has by their names alone."""
        assert self._compiler is not None
        tokenizer = self._compiler.vocabulary.special_tokenizer
        if not tokenizer.is_special_token(token_id):
            return RowFailure(_STOPPED, _STOP_TOKENS)
        return RowFailure(
            f"needs the special token {tokenizer.decode_str([token_id])}, which ends the output; "
            "leave it out",
            InvalidField(field, REASON),
        )

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
