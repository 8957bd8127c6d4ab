"""The logits processor of grammars."""

import os
from typing import Final

import structlog
from torch import Tensor

from kernels.logits import apply_bitmask
from quire.service.grammars import summary
from worker_svc.grammar.masks import TokenMasks
from worker_svc.grammar.row_grammar import RowGrammar
from worker_svc.logits.processor import LogitsError, ProcessorContext
from worker_svc.plan.inputs import Ints
from worker_svc.plan.logits_params import LogitsParams

log = structlog.get_logger()

_MAX_THREADS: Final = 8


class GrammarProcessor:
    """Excludes the tokens that the rows' grammars do not allow."""

    needs_token_ids = True

    def __init__(self, context: ProcessorContext) -> None:
        """Without a compiler of grammars, rows that have one fail."""
        self._context = context
        self._compiler = compiler = context.grammars
        self._rows: dict[int, RowGrammar] = {}
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
            raise LogitsError(f"the grammar is refused: {summary(error)}") from error
        followed = RowGrammar(
            matcher,
            params.grammar.begins_after_token_ids,
            params.stop_token_ids.tolist(),
            self._compiler.vocabulary.end_id,
        )
        for token_id in token_ids[num_prompt_tokens:].tolist():
            followed.append(token_id)
        if followed.error is not None:
            raise LogitsError(f"the output does not follow the grammar: {summary(followed.error)}")
        self._rows[row] = followed
        return True

    def release(self, row: int) -> None:
        del self._rows[row]

    def append(self, token_ids: Tensor, lines: Ints, rows: Ints) -> None:
        sampled = token_ids.numpy()[lines].tolist()
        for row, token_id in zip(rows.tolist(), sampled, strict=True):
            self._rows[row].append(token_id)

    def apply(self, logits: Tensor, lines: Ints, rows: Ints) -> None:
        followed = [self._rows[row] for row in rows.tolist()]
        masks = self._masks.compute(followed)
        for row in followed:
            if row.error is not None:
                # No token is possible, so the row fails in this step.
                log.error("a row cannot follow its grammar", reason=summary(row.error))
        upload = self._context.upload
        apply_bitmask(
            logits, upload(masks), upload(lines), implementation=self._context.implementation
        )

    def forced_token(self, row: int) -> int | None:
        """The next token of the row, where its grammar leaves no choice."""
        forced = self._rows[row].forced
        return forced[0] if forced else None
