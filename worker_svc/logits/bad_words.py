"""Makes the last token of a bad word impossible where the output ends with those before it."""

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from worker_svc.logits.batch_cache import BatchCache
from worker_svc.logits.masks import IMPOSSIBLE, exclude
from worker_svc.logits.processor import ProcessorContext
from worker_svc.logits.row_entries import RowEntries
from worker_svc.logits.slots import Slots, grown
from worker_svc.plan.inputs import Ints
from worker_svc.plan.logits_params import LogitsParams

# In the table of last tokens: before the beginning of the output.
_NOTHING: Final = -1


@dataclass(frozen=True)
class _BatchWords:
    """The words of all lines of a batch, on the device. The tokens before the last one are in one
    list, as words may be very different in length."""

    slots: Tensor  # int64 [num_tokens]
    columns: Tensor  # int64 [num_tokens], in the table of last tokens
    token_ids: Tensor  # int64 [num_tokens]
    words: Tensor  # int64 [num_tokens]
    places: Tensor  # int64 [num_words], of their last tokens, which words may share
    lines: Tensor  # int64 [num_places]
    last_tokens: Tensor  # int64 [num_places]


class BadWords:
    """`bad_words`: sequences of tokens that the output must not have, as vLLM defines them. The
    prompt does not count.

    The last tokens of each output are in a table on the device, so that matching does not need them
    on the host.
    """

    needs_token_ids = False

    def __init__(self, context: ProcessorContext) -> None:
        self._context = context
        self._single = RowEntries(context)
        self._has_single = np.zeros(context.max_num_seqs, bool)
        self._words: dict[int, list[Ints]] = {}  # of two tokens at least, by row
        self._has_words = np.zeros(context.max_num_seqs, bool)
        self._slots = Slots(context)
        self._ends = torch.empty(0, 1, dtype=torch.int64, device=context.device)
        self._batch = BatchCache(self._gather)

    def admit(
        self, row: int, params: LogitsParams, token_ids: Ints, num_prompt_tokens: int
    ) -> bool:
        known = [word for word in params.bad_words if self._is_possible(word)]
        single = np.unique(np.array([word[0] for word in known if len(word) == 1], np.int64))
        words = [word for word in known if len(word) > 1]
        self._has_single[row] = self._single.set(row, single)
        self._has_words[row] = False
        if words:
            with self._slots.take(row) as slot:
                self._write_end(slot, words, token_ids[num_prompt_tokens:])
            self._words[row] = words
            self._has_words[row] = True
            self._batch.clear()
        return bool(known)

    def release(self, row: int) -> None:
        if self._has_single[row]:
            self._single.remove(row)
        if self._has_words[row]:
            del self._words[row]
            self._slots.give_back(row)
            self._batch.clear()

    def append(self, token_ids: Tensor, lines: Ints, rows: Ints) -> None:
        matched = self._has_words[rows]
        if not matched.any():
            return
        batch = self._slots.of(lines[matched], rows[matched])
        ends = self._ends.index_select(0, batch.slots)
        new = token_ids.index_select(0, batch.lines).unsqueeze(1)
        self._ends.index_copy_(0, batch.slots, torch.cat([ends[:, 1:], new], 1))

    def apply(self, logits: Tensor, lines: Ints, rows: Ints) -> None:
        single, matched = self._has_single[rows], self._has_words[rows]
        if single.any():
            entries = self._single.of(lines[single], rows[single])
            exclude(logits, entries.lines, entries.token_ids)
        if matched.any():
            self._match(logits, self._batch.of(lines[matched], rows[matched]))

    def _is_possible(self, word: Ints) -> bool:
        """Whether the output could have it."""
        return 0 < len(word) <= self._context.max_model_len and word[-1] < self._context.vocab_size

    def _match(self, logits: Tensor, batch: _BatchWords) -> None:
        different = (self._ends[batch.slots, batch.columns] != batch.token_ids).int()
        num_different = torch.zeros_like(batch.places, dtype=torch.int32)
        num_different.index_add_(0, batch.words, different)
        num_found = torch.zeros_like(batch.lines, dtype=torch.int32)
        num_found.index_add_(0, batch.places, (num_different == 0).int())
        places = batch.lines, batch.last_tokens
        logits.index_put_(places, torch.where(num_found > 0, IMPOSSIBLE, logits[places]))

    def _write_end(self, slot: int, words: list[Ints], output: Ints) -> None:
        width = max(self._ends.shape[1], *(len(word) - 1 for word in words))
        missing = width - self._ends.shape[1]
        if missing:
            # No word of another row reaches as far back.
            self._ends = torch.nn.functional.pad(self._ends, (missing, 0), value=_NOTHING)
        self._ends = grown(self._ends, slot + 1, self._context.max_num_seqs)
        end = np.full(width, _NOTHING)
        if len(output):
            end[-len(output) :] = output[-width:]
        self._ends[slot].copy_(self._context.upload(end))

    def _gather(self, lines: Ints, rows: Ints) -> _BatchWords:
        found = [self._words[row] for row in rows.tolist()]
        per_line = [len(words) for words in found]
        prefixes = [word[:-1] for words in found for word in words]
        lengths = [len(prefix) for prefix in prefixes]
        width, upload = self._ends.shape[1], self._context.upload
        slots = np.repeat(self._slots.of_rows(rows), per_line)
        last_tokens = np.array([word[-1] for words in found for word in words])
        pairs = np.stack([np.repeat(lines, per_line), last_tokens])
        (place_lines, place_tokens), places = np.unique(pairs, axis=1, return_inverse=True)
        return _BatchWords(
            slots=upload(np.repeat(slots, lengths)),
            columns=upload(np.concatenate([np.arange(width - n, width) for n in lengths])),
            token_ids=upload(np.concatenate(prefixes)),
            words=upload(np.repeat(np.arange(len(prefixes)), lengths)),
            places=upload(places.reshape(-1)),
            lines=upload(place_lines),
            last_tokens=upload(place_tokens),
        )
