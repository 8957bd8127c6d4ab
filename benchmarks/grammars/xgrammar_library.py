"""xgrammar as the benchmark calls it."""

import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import xgrammar
from numpy.typing import NDArray
from tokenizers import Tokenizer


class Library:
    version = version("xgrammar")

    def __init__(self, tokenizer: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(tokenizer))
        tokens = self._tokenizer.get_vocab()
        self.end_token_id = len(tokens)
        encoded = [*sorted(tokens, key=lambda token: tokens[token]), "<|benchmark_end|>"]
        info = xgrammar.TokenizerInfo(
            encoded,
            xgrammar.VocabType.BYTE_LEVEL,
            vocab_size=len(encoded),
            stop_token_ids=[self.end_token_id],
        )
        # The cache would hide the time to compile.
        self._compiler = xgrammar.GrammarCompiler(info, cache_enabled=False)
        self._batch = xgrammar.BatchGrammarMatcher()
        self._width = -(-len(encoded) // 32)

    def compile(self, schema: Any) -> Any:
        return self._compiler.compile_json_schema(
            json.dumps(schema), any_whitespace=False, separators=(", ", ": "), strict_mode=False
        )

    def matcher(self, grammar: Any) -> Any:
        return xgrammar.GrammarMatcher(grammar)

    def bitmask(self, num_rows: int) -> NDArray[np.int32]:
        return np.zeros((num_rows, self._width), np.int32)

    def fill(self, matchers: Sequence[Any], bitmask: NDArray[np.int32]) -> None:
        self._batch.batch_fill_next_token_bitmask(list(matchers), bitmask)

    def consume(self, matcher: Any, token_id: int) -> None:
        assert matcher.accept_token(token_id)

    def decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids))

    def accepts(self, grammar: Any, text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(grammar, terminate_without_stop_token=True)
        return bool(matcher.accept_string(text)) and bool(matcher.is_terminated())
