"""The bytes of tokens, which need not be whole characters."""

import json
from collections.abc import Iterator

from tokenizers import Tokenizer

from gateway_svc.text.detokenizer import TokenTexts, Vocabulary


class TokenBytes(dict[int, bytes]):
    """The bytes of each token alone, looked up at first use."""

    def __init__(self, vocabulary: Vocabulary, texts: TokenTexts) -> None:
        self._vocabulary = vocabulary
        self._texts = texts
        self._of_characters = _byte_characters() if _is_byte_level(vocabulary.tokenizer) else {}

    def __missing__(self, token_id: int) -> bytes:
        data = self[token_id] = self._find(token_id)
        return data

    def _find(self, token_id: int) -> bytes:
        token: str = self._vocabulary.tokenizer.id_to_token(token_id) or ""
        if token_id in self._vocabulary.byte_ids:
            return bytes([self._vocabulary.byte_ids[token_id]])
        if self._of_characters and token_id in self._vocabulary.plain_ids:
            found = [self._of_characters.get(character) for character in token]
            if None not in found:
                return bytes(byte for byte in found if byte is not None)
        return self._texts[token_id].encode()


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    """Whether tokens are written in GPT-2's characters for bytes."""
    if tokenizer.decoder is None:
        return False
    # Its state is its part of `tokenizer.json`.
    decoder = json.loads(tokenizer.decoder.__getstate__())
    return any(part.get("type") == "ByteLevel" for part in [decoder, *decoder.get("decoders", [])])


def _byte_characters() -> dict[str, int]:
    """GPT-2's characters: printable Latin-1 stands for itself, other bytes for U+0100 and on."""

    def characters() -> Iterator[tuple[str, int]]:
        num_others = 0
        for byte in range(256):
            if 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255:
                yield chr(byte), byte
            else:
                yield chr(256 + num_others), byte
                num_others += 1

    return dict(characters())
