"""Tokenization in which the text of a special token is text."""

import re
from collections.abc import Sequence
from itertools import pairwise

from llguidance import LLTokenizer


class PlainTokenizer:
    """A tokenizer as llguidance calls it: the same tokens as those of `special`, which reads the
    texts of special tokens as these tokens, but for such texts. A string of a format may have them.
    """

    # By it llguidance knows that this may be called.
    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, special: LLTokenizer) -> None:
        token_ids = range(special.vocab_size)
        self.tokens = [special.decode_bytes([token_id]) for token_id in token_ids]
        self.special_token_ids = [one for one in token_ids if special.is_special_token(one)]
        # A token that the model does not have: the first id from which on no token has a text.
        self.eos_token_id = end_id = _without_texts(self.tokens)
        if end_id == len(self.tokens):
            self.tokens.append(_stand_in(end_id))
            self.special_token_ids.append(end_id)
        texts = {self.tokens[one].decode(errors="replace") for one in self.special_token_ids}
        # Also those that overlap. One of a single character cannot be cut.
        found = "|".join(re.escape(text) for text in sorted(texts) if len(text) > 1)
        self._special_text = re.compile(f"(?={found})" if found else "(?!)")
        self._tokenizer = special

    def forget_tokens(self) -> None:
        """To be called when llguidance has copied them: they take 10 MB for 150,000 tokens."""
        self.tokens = []
        self.special_token_ids = []

    def __call__(self, text: str) -> list[int]:
        """The tokens of a text. One with the text of a special token is cut behind the first
        character of each, so that no part has it."""
        cuts = [match.start() + 1 for match in self._special_text.finditer(text)]
        if not cuts:
            return self._tokenizer.tokenize_str(text)
        parts = pairwise([0, *cuts, len(text)])
        return [one for at, end in parts for one in self._tokenizer.tokenize_str(text[at:end])]


def _without_texts(tokens: Sequence[bytes]) -> int:
    """The number of tokens up to the last that has a text."""
    end_id = len(tokens)
    while end_id and tokens[end_id - 1] == _stand_in(end_id - 1):
        end_id -= 1
    return end_id


def _stand_in(token_id: int) -> bytes:
    """What llguidance shows in the place of the text that a token lacks."""
    return b"<[%d]>" % token_id
