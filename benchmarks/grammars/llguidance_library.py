"""llguidance as the benchmark calls it."""

import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from numpy.typing import NDArray

_END = "<|benchmark_end|>"
_FORM: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Library:
    version = version("llguidance")

    def __init__(self, tokenizer: Path) -> None:
        document = json.loads(tokenizer.read_text())
        self.end_token_id = 1 + max(
            *document["model"]["vocab"].values(), *(t["id"] for t in document["added_tokens"])
        )
        like = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        end = {"id": self.end_token_id, "content": _END, "special": True, **like}
        document["added_tokens"].append(end)
        self._tokenizer = LLTokenizer(json.dumps(document), eos_token=self.end_token_id)
        self._executor = LLExecutor()

    def compile(self, schema: Any) -> LLMatcher:
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_FORM)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    def matcher(self, grammar: LLMatcher) -> LLMatcher:
        return grammar.deep_copy()

    def bitmask(self, num_rows: int) -> NDArray[np.int32]:
        return np.zeros((num_rows, self._tokenizer.vocab_size // 32 + 1), np.int32)

    def fill(self, matchers: Sequence[LLMatcher], bitmask: NDArray[np.int32]) -> None:
        width = -(-self._tokenizer.vocab_size // 32)
        assert width == bitmask.shape[1]
        indexed = [(matcher, at) for at, matcher in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(
            indexed, bitmask.ctypes.data, 4 * width, len(bitmask)
        )

    def consume(self, matcher: LLMatcher, token_id: int) -> None:
        assert matcher.consume_token(token_id), matcher.get_error()

    def decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode_str(token_ids)

    def accepts(self, grammar: LLMatcher, text: str) -> bool:
        matcher = grammar.deep_copy()
        token_ids = self._tokenizer.tokenize_str(text)
        return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()
