"""The tokens that may follow in each row, as bits."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray

from kernels.logits import BITS, bitmask_width
from quire.service.grammars import GrammarVocabulary
from worker_svc.grammar.row_grammar import RowGrammar
from worker_svc.plan.inputs import Ints

Bits = NDArray[np.int32]
Words = NDArray[np.uint32]

_WORD: Final = BITS
_ALL: Final = 0xFFFFFFFF


@dataclass(frozen=True)
class _StopTokens:
    """The stop tokens of lines of masks, as the bits of each word that has any."""

    lines: Ints
    words: Ints
    bits: Words
    others: Words  # all bits but these

    @classmethod
    def of(cls, stop_token_ids: Sequence[Iterable[int]]) -> "_StopTokens":
        """Those of each line."""
        bits: dict[tuple[int, int], int] = {}
        for line, token_ids in enumerate(stop_token_ids):
            for token_id in token_ids:
                place = line, token_id // _WORD
                bits[place] = bits.get(place, 0) | 1 << token_id % _WORD
        places = np.array([*bits], np.int64).reshape(-1, 2)
        values = np.array([*bits.values()], np.uint32)
        return cls(places[:, 0].copy(), places[:, 1].copy(), values, ~values)

    def write(self, masks: Words, may_end: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
        """Make stop tokens possible in the lines that may end, and in no others. Yields the lines
        where one was possible before and nothing is possible now, with this token."""
        before = masks[self.lines, self.words]
        after = before & self.others
        if may_end.any():
            after |= np.where(may_end[self.lines], self.bits, 0)
        masks[self.lines, self.words] = after
        removed = before & ~after
        if not removed.any():
            return
        for index in np.flatnonzero(removed).tolist():
            line = int(self.lines[index])
            if not masks[line].any():
                token = int(removed[index]).bit_length() - 1
                yield line, _WORD * int(self.words[index]) + token


@dataclass(frozen=True)
class MaskWork:
    """What masks of some rows take."""

    rows: Sequence[RowGrammar]
    # Those that need the library's masks: their matchers and lines.
    guided: list[tuple[LLMatcher, int]]
    stops: _StopTokens


class TokenMasks:
    """Computes masks into one buffer, in several threads."""

    def __init__(
        self,
        vocabulary: GrammarVocabulary,
        vocab_size: int,
        max_num_seqs: int,
        num_threads: int,
    ) -> None:
        """`vocab_size` is that of the logits."""
        self.end_id = vocabulary.end_id
        self._end_word, self._end_bit = self.end_id // _WORD, np.uint32(1 << self.end_id % _WORD)
        self._executor = LLExecutor(num_threads)
        # One bit more than the model has tokens, where the tokenizer has as many.
        self._buffer: Words = np.zeros((max_num_seqs, -(-vocabulary.size // _WORD)), np.uint32)
        self._address, (self._line_bytes, _) = self._buffer.ctypes.data, self._buffer.strides
        self._width = bitmask_width(vocab_size)
        # The rows' stop tokens in the last call.
        self._stops_of_rows: list[frozenset[int]] = []
        self._stops = _StopTokens.of(())
        # Ids that no text has are impossible in any grammar, even in one that names them. They are
        # the model's last ones, if it has any; these are the words that have some.
        num_known = min(vocabulary.end_id, vocab_size)
        self._first_unknown = num_known // _WORD
        known = np.arange(_WORD * self._buffer.shape[1]) < num_known
        words: Words = np.packbits(known, bitorder="little").view(np.uint32)
        self._known = words[self._first_unknown : self._width]

    def compute(self, rows: Sequence[RowGrammar]) -> Bits:
        """Bitmasks as of `kernels.logits.apply_bitmask`, valid until the next call. Stop tokens are
        possible where the row's output may end."""
        work = self.plan(rows)
        self.fill(work)
        return self.complete(work)

    def plan(self, rows: Sequence[RowGrammar]) -> MaskWork:
        """The first part of `compute`."""
        guided = [(row.matcher, line) for line, row in enumerate(rows) if row.needs_mask]
        return MaskWork(rows, guided, self._stop_tokens(rows))

    def fill(self, work: MaskWork) -> None:
        """The second part, which changes no row and may run on another thread. One call of the
        library for all rows: each has to wait for the interpreter when it returns."""
        if work.guided:
            self._executor.unsafe_compute_mask_ptr(
                work.guided, self._address, self._line_bytes, len(self._buffer)
            )

    def complete(self, work: MaskWork) -> Bits:
        """The third part."""
        rows, masks = work.rows, self._buffer[: len(work.rows)]
        may_end = masks[:, self._end_word] & self._end_bit != 0
        masks = masks[:, : self._width]
        if self._known.size:
            masks[:, self._first_unknown :] &= self._known
        for line, token_id in work.stops.write(masks, may_end):
            if rows[line].needs_mask:
                rows[line].stopped_by = token_id
        for matcher, line in work.guided:
            if matcher.is_error():
                rows[line].error = matcher.get_error()
                masks[line] = 0
        if len(work.guided) < len(rows):
            for line, row in enumerate(rows):
                if not row.needs_mask:
                    _write_without_grammar(masks[line], row)
        return np.ascontiguousarray(masks).view(np.int32)

    def _stop_tokens(self, rows: Sequence[RowGrammar]) -> _StopTokens:
        """Most steps have the rows of the step before."""
        of_rows = [row.stop_token_ids for row in rows]
        if of_rows != self._stops_of_rows:
            self._stops_of_rows, self._stops = of_rows, _StopTokens.of(of_rows)
        return self._stops


def _write_without_grammar(mask: Words, row: RowGrammar) -> None:
    """Write the mask of a row whose grammar has not begun, has ended, or forces a token."""
    if row.is_free:
        mask[:] = _ALL
        for token_id in () if row.may_end_free else row.stop_token_ids:
            mask[token_id // _WORD] &= _ALL ^ 1 << token_id % _WORD
        return
    mask[:] = 0
    if row.forced:
        possible: Iterable[int] = (row.forced[0],)
    else:
        possible = row.stop_token_ids if row.has_ended else ()
    for token_id in possible:
        mask[token_id // _WORD] |= 1 << token_id % _WORD
