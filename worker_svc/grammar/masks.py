"""The tokens that may follow in each row, as bits."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from llguidance import LLExecutor
from numpy.typing import NDArray

from kernels.logits import BITS, bitmask_width
from quire.service.grammars import GrammarVocabulary
from worker_svc.grammar.row_grammar import RowGrammar
from worker_svc.plan.inputs import Ints

Bits = NDArray[np.int32]

_WORD: Final = BITS


class TokenMasks:
    """Computes masks in several threads, into one buffer."""

    def __init__(
        self, vocabulary: GrammarVocabulary, vocab_size: int, max_num_seqs: int, num_threads: int
    ) -> None:
        """`vocab_size` is that of the logits."""
        self._end_id = vocabulary.end_id
        self._executor = LLExecutor(num_threads)
        # One bit more than the model has tokens, where the tokenizer has as many.
        self._buffer = np.zeros((max_num_seqs, -(-vocabulary.size // _WORD)), np.int32)
        self._width = bitmask_width(vocab_size)
        # Ids that no text has are impossible in any grammar, even in one that names them.
        known = np.arange(_WORD * self._buffer.shape[1]) < min(vocabulary.end_id, vocab_size)
        self._known = np.packbits(known, bitorder="little").view(np.int32)

    def compute(self, rows: Sequence[RowGrammar], stop_token_ids: Sequence[Ints]) -> Bits:
        """Bitmasks as of `kernels.logits.apply_bitmask`, valid until the next call. Stop tokens are
        possible where the row's output may end."""
        masks = self._buffer[: len(rows)]
        guided = [(row.matcher, line) for line, row in enumerate(rows) if row.needs_mask]
        if guided:
            self._executor.unsafe_compute_mask_ptr(
                guided, masks.ctypes.data, masks.strides[0], len(masks)
            )
        for line, row in enumerate(rows):
            self._complete(masks[line], row, stop_token_ids[line])
        return np.ascontiguousarray(masks[:, : self._width])

    def _complete(self, mask: Bits, row: RowGrammar, stop_token_ids: Ints) -> None:
        if row.is_free:
            mask[:] = -1
            return
        if not row.needs_mask:
            mask[:] = 0
            may_end = row.has_ended
            if row.forced:
                _set(mask, np.array([row.forced[0]]))
        else:
            if row.matcher.is_error():
                row.error = row.matcher.get_error()
                mask[:] = 0
                return
            may_end = bool(mask[self._end_id // _WORD] >> (self._end_id % _WORD) & 1)
        mask &= self._known
        if may_end:
            _set(mask, stop_token_ids)
        else:
            _clear(mask, stop_token_ids)


def _set(mask: Bits, token_ids: Ints) -> None:
    np.bitwise_or.at(mask.view(np.uint32), token_ids // _WORD, _bits(token_ids))


def _clear(mask: Bits, token_ids: Ints) -> None:
    np.bitwise_and.at(mask.view(np.uint32), token_ids // _WORD, ~_bits(token_ids))


def _bits(token_ids: Ints) -> NDArray[np.uint32]:
    return np.left_shift(np.uint32(1), (token_ids % _WORD).astype(np.uint32))
