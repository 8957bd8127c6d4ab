"""Incremental detokenization: emits only whole characters that later tokens cannot change."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer, decoders

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A character has at most four bytes, a token at least one. So four tokens hold the beginning of
# any unfinished character; decoding from there differs from decoding all only in text already sent.
_CONTEXT_TOKENS = 4
_WINDOW_TOKENS = 16


@dataclass(frozen=True)
class Vocabulary:
    """Data that all detokenizers of one tokenizer share."""

    tokenizer: Tokenizer
    # All ids that have a token; a model's embedding may have more rows.
    known_ids: frozenset[int]
    # Those without the special tokens.
    plain_ids: frozenset[int]
    # The bytes of the tokens <0x00> to <0xFF> of vocabularies with byte fallback, by id.
    byte_ids: Mapping[int, int]
    # Characters of the longest token, as it is written in the vocabulary.
    longest_token: int
    whole_texts: "WholeTexts"

    @classmethod
    def from_tokenizer(
        cls, tokenizer: Tokenizer, special_tokens: Collection[str] = ()
    ) -> "Vocabulary":
        """`special_tokens` are special even if the tokenizer's file has them as added tokens that
        are not. Others of its tokens stay text: some models pad with the token of a letter."""
        tokens: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        # Of two tokens with one text, as Unigram may have, `tokens` has the last.
        ids = range(max(tokens.values(), default=-1) + 1)
        known = frozenset(id_ for id_ in ids if tokenizer.id_to_token(id_) is not None)
        added = tokenizer.get_added_tokens_decoder().items()
        special = {id_ for id_, token in added if token.special or token.content in special_tokens}
        bytes_ = ((tokenizer.token_to_id(f"<0x{byte:02X}>"), byte) for byte in range(256))
        byte_ids = {id_: byte for id_, byte in bytes_ if id_ is not None}
        return cls(
            tokenizer,
            known_ids=known,
            plain_ids=known - special,
            byte_ids=byte_ids,
            longest_token=max(map(len, tokens), default=1),
            whole_texts=WholeTexts(tokenizer, byte_ids),
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=False)
        return text


class WholeTexts(dict[int, str | None]):
    """The text of each token that adds the same text behind all whole characters; None for others.
    Looked up at first use.

    Byte-level decoders join the bytes of tokens, so these are the tokens of whole characters. With
    other decoders the text of a token may depend on its neighbours.
    """

    def __init__(self, tokenizer: Tokenizer, byte_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._byte_ids = byte_ids
        self._is_byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)

    def __missing__(self, token_id: int) -> str | None:
        text = self[token_id] = self._find(token_id)
        return text

    def _find(self, token_id: int) -> str | None:
        if not self._is_byte_level or token_id in self._byte_ids:
            return None
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return None if _REPLACEMENT in text else text


class TokenTexts(dict[int, str]):
    """The text of each token, special ones included, decoded at first use.

    It is the text behind another token: at the beginning of a text decoders leave out the space of
    a word, or show the mark of a token that continues one.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._before = _word(vocabulary)
        self._before_text = vocabulary.decode(self._before)

    def __missing__(self, token_id: int) -> str:
        text = self._vocabulary.decode([*self._before, token_id])
        if text.startswith(self._before_text):
            text = text[len(self._before_text) :]
        else:
            text = self._vocabulary.decode([token_id])
        self[token_id] = text
        return text


def _word(vocabulary: Vocabulary) -> list[int]:
    """A token of whole characters that are no space; none if the vocabulary has no such token."""
    for token_id in sorted(vocabulary.plain_ids - vocabulary.byte_ids.keys()):
        text = vocabulary.decode([token_id])
        if text.strip() and _REPLACEMENT not in text:
            return [token_id]
    return []


class Detokenizer:
    """Decodes the tokens of one choice.

    The deltas of `push` and `flush`, joined, equal the text of all pushed ids decoded
    at once after `context`. A character that begins in the context and ends in the ids is part of
    it. The text emitted up to an id depends only on the ids up to it, so that
    another detokenizer can continue there. Each id is decoded a bounded number of times, however
    long the choice is.

    Held back are an unfinished character of a byte-level vocabulary, and a run of byte tokens:
    decoders read a run as a whole, and one invalid byte changes all of it.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        skip_special_tokens: bool = True,
        context: Sequence[int] = (),
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        """`shown_ids` are visible even if they are special tokens."""
        self._vocabulary = vocabulary
        self._visible = vocabulary.plain_ids if skip_special_tokens else vocabulary.known_ids
        if not shown_ids <= self._visible:
            self._visible |= shown_ids
        # Of the window's text, characters [0, sent) have been emitted.
        self._window = self.trim_context(vocabulary, skip_special_tokens, context)
        text = vocabulary.decode(self._window)
        self._sent = len(text)
        # Whether the context ends within a character that the tokens so far have not completed.
        self._is_context_open = text.endswith(_REPLACEMENT)
        # Whether the window's text may have more characters.
        self._holds = self._is_context_open

    @staticmethod
    def trim_context(
        vocabulary: Vocabulary, skip_special_tokens: bool, context: Sequence[int]
    ) -> list[int]:
        """Return the part of a context that affects the text after it: its end, without invisible
        tokens and without a trailing run of byte tokens.
        """
        visible = vocabulary.plain_ids if skip_special_tokens else vocabulary.known_ids
        tail: list[int] = []
        for id_ in reversed(context):
            if id_ not in visible or (not tail and id_ in vocabulary.byte_ids):
                continue
            tail.append(id_)
            if len(tail) == _CONTEXT_TOKENS:
                break
        return tail[::-1]

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that became certain with these tokens, which are decoded together. It is
        the same as that of pushing them one by one.
        """
        if len(token_ids) == 1 and not self._holds:
            [token_id] = token_ids
            if token_id in self._visible:
                whole = self._vocabulary.whole_texts[token_id]
                if whole is not None:
                    self._window.append(token_id)
                    self._sent += len(whole)
                    self._slide(0)
                    return whole
        visible = [id_ for id_ in token_ids if id_ in self._visible]
        num_closed = self._num_closed(visible)
        if not num_closed:
            self._window += visible
            self._holds = self._holds or bool(visible)
            return ""
        self._window += visible[:num_closed]
        text = self._vocabulary.decode(self._window)
        if self._is_context_open:
            self._continue_context(text)
        certain = len(text) - text.endswith(_REPLACEMENT)
        delta = text[self._sent : certain]
        self._sent = max(self._sent, certain)
        has_more = len(text) > self._sent or num_closed < len(visible)
        self._holds = has_more or self._is_context_open
        self._slide(len(text) - self._sent)
        self._window += visible[num_closed:]
        return delta

    def shows(self, token_id: int) -> bool:
        """Whether a token is part of the text."""
        return token_id in self._visible

    def byte_of(self, token_id: int) -> int | None:
        """The byte of a byte token."""
        return self._vocabulary.byte_ids.get(token_id)

    def held(self) -> str:
        """Return the text that is held back; unfinished characters are U+FFFD."""
        return self._vocabulary.decode(self._window)[self._sent :] if self._holds else ""

    def flush(self) -> str:
        """Return the text held back at the end; unfinished characters become U+FFFD."""
        delta = self.held()
        self._sent += len(delta)
        return delta

    def _continue_context(self, text: str) -> None:
        """Find out whether the context's last character, which was unfinished, is complete in the
        window's text."""
        if text[self._sent - 1 : self._sent] != _REPLACEMENT:
            self._sent -= 1
        self._is_context_open = len(text) == self._sent

    def _num_closed(self, token_ids: Sequence[int]) -> int:
        """Number of tokens before a trailing run of byte tokens, which may continue."""
        byte_ids = self._vocabulary.byte_ids
        for at in range(len(token_ids), 0, -1):
            if token_ids[at - 1] not in byte_ids:
                return at
        return 0

    def _slide(self, num_held: int) -> None:
        if len(self._window) > _WINDOW_TOKENS:
            self._window = self._window[-_CONTEXT_TOKENS:]
            self._sent = len(self._vocabulary.decode(self._window)) - num_held
