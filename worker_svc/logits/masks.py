"""Makes tokens impossible that do not depend on the output: those that are not allowed, and stop
tokens before `min_tokens`."""

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.logits import BITS, apply_bitmask, bitmask_width
from worker_svc.logits.batch_cache import BatchCache
from worker_svc.logits.processor import ProcessorContext
from worker_svc.logits.row_entries import RowEntries
from worker_svc.plan.inputs import Ints
from worker_svc.plan.logits_params import LogitsParams

IMPOSSIBLE: Final = float("-inf")


class AllowedTokens:
    """`allowed_token_ids`: all other tokens are impossible."""

    needs_token_ids = False

    def __init__(self, context: ProcessorContext) -> None:
        self._context = context
        self._masks: dict[int, NDArray[np.int32]] = {}  # by row
        self._batch = BatchCache(self._gather)

    def admit(
        self, row: int, params: LogitsParams, token_ids: Ints, num_prompt_tokens: int
    ) -> bool:
        if not len(params.allowed_token_ids):
            return False
        self._masks[row] = _mask(params.allowed_token_ids, self._context.vocab_size)
        self._batch.clear()
        return True

    def release(self, row: int) -> None:
        del self._masks[row]
        self._batch.clear()

    def append(self, token_ids: Tensor, lines: Ints, rows: Ints) -> None:
        """The mask does not depend on tokens."""

    def apply(self, logits: Tensor, lines: Ints, rows: Ints) -> None:
        bitmask, places = self._batch.of(lines, rows)
        apply_bitmask(logits, bitmask, places, implementation=self._context.implementation)

    def _gather(self, lines: Ints, rows: Ints) -> tuple[Tensor, Tensor]:
        masks = np.stack([self._masks[row] for row in rows.tolist()])
        return self._context.upload(masks), self._context.upload(lines)


class MinTokens:
    """`min_tokens`: stop tokens are impossible until the output has so many tokens, or until the
    end of its grammar: where nothing else is possible, they are."""

    needs_token_ids = False

    def __init__(self, context: ProcessorContext) -> None:
        # Of rows without a grammar, and with one.
        self._stop_tokens = RowEntries(context), RowEntries(context)
        self._has_grammar = np.zeros(context.max_num_seqs, np.int64)
        # Of each row: tokens that the output still needs.
        self._missing = np.zeros(context.max_num_seqs, np.int64)

    def admit(
        self, row: int, params: LogitsParams, token_ids: Ints, num_prompt_tokens: int
    ) -> bool:
        missing = params.min_tokens - (len(token_ids) - num_prompt_tokens)
        has_grammar = params.grammar is not None
        self._missing[row], self._has_grammar[row] = missing, has_grammar
        return missing > 0 and self._stop_tokens[has_grammar].set(row, params.stop_token_ids)

    def release(self, row: int) -> None:
        self._stop_tokens[self._has_grammar[row]].remove(row)

    def append(self, token_ids: Tensor, lines: Ints, rows: Ints) -> None:
        self._missing[rows] -= 1

    def apply(self, logits: Tensor, lines: Ints, rows: Ints) -> None:
        masked = self._missing[rows] > 0
        for has_grammar, stop_tokens in enumerate(self._stop_tokens):
            chosen = masked & (self._has_grammar[rows] == has_grammar)
            if not chosen.any():
                continue
            entries = stop_tokens.of(lines[chosen], rows[chosen])
            places = entries.lines, entries.token_ids
            before = logits[places]
            exclude(logits, *places)
            if has_grammar:
                ended = (logits == IMPOSSIBLE).all(-1).index_select(0, entries.lines)
                logits.index_put_(places, torch.where(ended, before, IMPOSSIBLE))


def exclude(logits: Tensor, lines: Tensor, token_ids: Tensor) -> None:
    """Make token `token_ids[i]` impossible in line `lines[i]`."""
    impossible = logits.new_full((), IMPOSSIBLE)
    logits.index_put_((lines, token_ids), impossible)


def _mask(token_ids: Ints, vocab_size: int) -> NDArray[np.int32]:
    """A line of a bitmask that allows these tokens."""
    possible = np.zeros(bitmask_width(vocab_size) * BITS, bool)
    possible[token_ids[token_ids < vocab_size]] = True
    return np.packbits(possible, bitorder="little").view(np.int32)
