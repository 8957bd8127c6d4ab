"""The characters of a text before each of its tokens."""

import codecs
from collections.abc import Sequence

from gateway_svc.text.detokenizer import Detokenizer, Vocabulary

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class TextOffsets:
    """Decodes tokens, and counts the characters before each, also those that are held back.

    A token that begins within a character has the offset of that character. Within a run of byte
    tokens, whose text depends on later ones, the characters are those of the bytes so far.
    """

    def __init__(self, detokenizer: Detokenizer | None, num_before: int) -> None:
        """`num_before` are the characters before the first token. There is no text without a
        detokenizer."""
        self._detokenizer = detokenizer
        self._num_emitted = num_before
        # Of a run of byte tokens: its characters, with those held back before it; else None.
        self._num_in_run: int | None = None
        self._run = _Utf8Decoder("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that became certain with these tokens."""
        text = "" if self._detokenizer is None else self._detokenizer.push(token_ids)
        self._num_emitted += len(text)
        self._num_in_run = None
        return text

    def push_one(self, token_id: int | None) -> tuple[int, str]:
        """Return the offset of a token, and the text that became certain with it. None is a token
        that is left out of the text."""
        detokenizer, num_emitted = self._detokenizer, self._num_emitted
        if detokenizer is None:
            return num_emitted, ""
        if token_id is None or not detokenizer.shows(token_id):
            return num_emitted + (self._num_in_run or 0), ""
        byte = detokenizer.byte_of(token_id)
        if byte is not None and self._num_in_run is not None:
            return num_emitted + self._num_in_run, self._push_byte(token_id, byte)
        held = detokenizer.held()
        if byte is not None:
            self._run.reset()
            self._num_in_run = len(held)
            return num_emitted + len(held), self._push_byte(token_id, byte)
        text = self.push([token_id])
        after = text + detokenizer.held()
        # Otherwise it continues the unfinished character that is held back.
        begins_after = len(after) > len(held) and after.startswith(held)
        return num_emitted + (len(held) if begins_after else 0), text

    def _push_byte(self, token_id: int, byte: int) -> str:
        """Of a run that has begun."""
        num_in_run = (self._num_in_run or 0) + len(self._run.decode(bytes([byte])))
        text = self.push([token_id])
        self._num_in_run = num_in_run
        return text


def text_offsets(vocabulary: Vocabulary, token_ids: Sequence[int], text: str) -> list[int]:
    """Where the text of each token begins in `text`, to which special tokens may have been
    added."""
    detokenizer = Detokenizer(vocabulary, skip_special_tokens=False)
    offsets = TextOffsets(detokenizer, 0)
    pushed = [offsets.push_one(token_id) for token_id in token_ids]
    decoded = "".join([*(piece for _, piece in pushed), detokenizer.flush()])
    num_added = _num_added(vocabulary, token_ids, decoded, text)
    return [min(max(0, offset - num_added), len(text)) for offset, _ in pushed]


def _num_added(vocabulary: Vocabulary, token_ids: Sequence[int], decoded: str, text: str) -> int:
    """The characters of special tokens before `text`, which may have special tokens of its own."""
    is_plain = (at for at, id_ in enumerate(token_ids) if id_ in vocabulary.plain_ids)
    num_special = next(is_plain, len(token_ids))
    at = decoded.find(text, len(vocabulary.decode(token_ids[:num_special])))
    return max(0, decoded.find(text) if at < 0 else at)
