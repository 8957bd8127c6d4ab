"""The tokens that may follow in each row, as bits."""

import time
from collections.abc import Sequence
from typing import Final

import numpy as np
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray

from kernels.logits import BITS, bitmask_width
from quire.service.grammars import GrammarVocabulary
from worker_svc.grammar.row_grammar import RowGrammar

Bits = NDArray[np.int32]
Words = NDArray[np.uint32]

_WORD: Final = BITS
_ALL: Final = 0xFFFFFFFF
# The calling thread computes masks alone for so long, and most steps need no longer. The other
# threads have to wake up on cores where the kernels' threads still spin.
_ALONE_S: Final = 1e-3


class TokenMasks:
    """Computes masks into one buffer, in several threads if they take long."""

    def __init__(
        self,
        vocabulary: GrammarVocabulary,
        vocab_size: int,
        max_num_seqs: int,
        num_threads: int,
        alone_s: float = _ALONE_S,
    ) -> None:
        """`vocab_size` is that of the logits. The calling thread computes alone for `alone_s`."""
        self.end_id = vocabulary.end_id
        self._alone_s = alone_s
        self._executor = LLExecutor(num_threads)
        # One bit more than the model has tokens, where the tokenizer has as many.
        self._buffer: Words = np.zeros((max_num_seqs, -(-vocabulary.size // _WORD)), np.uint32)
        self._width = bitmask_width(vocab_size)
        # Ids that no text has are impossible in any grammar, even in one that names them.
        known = np.arange(_WORD * self._buffer.shape[1]) < min(vocabulary.end_id, vocab_size)
        self._known: Words = np.packbits(known, bitorder="little").view(np.uint32)

    def compute(self, rows: Sequence[RowGrammar]) -> Bits:
        """Bitmasks as of `kernels.logits.apply_bitmask`, valid until the next call. Stop tokens are
        possible where the row's output may end."""
        masks = self._buffer[: len(rows)]
        guided = [(row.matcher, line) for line, row in enumerate(rows) if row.needs_mask]
        self._compute(guided, masks)
        may_end = (masks[:, self.end_id // _WORD] >> (self.end_id % _WORD) & 1).tolist()
        masks &= self._known
        for line, row in enumerate(rows):
            self._complete(masks[line], row, bool(may_end[line]))
        return np.ascontiguousarray(masks[:, : self._width]).view(np.int32)

    def _compute(self, guided: list[tuple[LLMatcher, int]], masks: Words) -> None:
        """Compute the mask of each matcher into its line."""
        address, (line_bytes, _) = masks.ctypes.data, masks.strides
        deadline_s = time.perf_counter() + self._alone_s
        for done, (matcher, line) in enumerate(guided):
            if time.perf_counter() > deadline_s:
                self._executor.unsafe_compute_mask_ptr(
                    guided[done:], address, line_bytes, len(masks)
                )
                return
            matcher.unsafe_compute_mask_ptr(address + line * line_bytes, line_bytes)

    def _complete(self, mask: Words, row: RowGrammar, may_end: bool) -> None:
        if row.is_free:
            mask[:] = _ALL
            for token_id in () if row.may_end_free else row.stop_token_ids:
                mask[token_id // _WORD] &= _ALL ^ 1 << token_id % _WORD
            return
        if not row.needs_mask:
            mask[:] = 0
            may_end = row.has_ended
            if row.forced:
                mask[row.forced[0] // _WORD] = 1 << row.forced[0] % _WORD
                return
        elif row.matcher.is_error():
            row.error = row.matcher.get_error()
            mask[:] = 0
            return
        stopped_by = None
        for token_id in row.stop_token_ids:
            word, bit = token_id // _WORD, 1 << token_id % _WORD
            if int(mask[word]) & bit:
                stopped_by = token_id
            mask[word] = int(mask[word]) | bit if may_end else int(mask[word]) & ~bit
        row.stopped_by = None if mask.any() else stopped_by
