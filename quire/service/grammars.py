"""Grammars of llguidance: the vocabulary that they read, and matchers with limits.

Gateways compile a grammar to check it, workers to follow it; both must decide alike.
"""

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, cast

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from tokenizers import AddedToken, Tokenizer

from quire.service.plain_tokenizer import PlainTokenizer

# A token that no model has. A mask that has it says that the output may end.
_END: Final = "<|quire: the format ends here|>"
# Without texts of the parser's state in errors: they hold the output. The fuel bounds the work at
# the start of a grammar: with the library's million, `(a{1000}){1000}` takes a second. The other
# limits are the library's.
_LIMITS: Final = LLParserLimits(verbose_errors=False, initial_lexer_fuel=250_000)
_QUIET: Final = 0
_REJECTION: Final = "doesn't satisfy the grammar"
# The library compiles recursively, and a rule within a rule takes 3 kB of the thread's stack: the
# 13,000 rules of a format of 128 KiB would end the process with 8 MiB. Memory is used as needed.
_STACK_BYTES: Final = 2**28


class GrammarError(ValueError):
    """A grammar that cannot be compiled; the message is the library's reason."""


class NoGrammarsError(Exception):
    """A tokenizer that the library does not read; the message has the reason."""


@dataclass(frozen=True)
class GrammarVocabulary:
    """A model's vocabulary as grammars use it. Ids from the tokenizer's size on are impossible."""

    # The text of a special token is spelled by ordinary ones.
    tokenizer: LLTokenizer
    # Another one, which reads such texts as the special tokens.
    special_tokenizer: LLTokenizer
    # The bit of a mask that says that the output may end; not a token of the model.
    end_id: int

    @property
    def size(self) -> int:
        """The number of bits of a mask."""
        return self.tokenizer.vocab_size

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer, vocab_size: int) -> "GrammarVocabulary":
        """`vocab_size` is the model's, which may exceed the tokenizer's. Takes a second for 100,000
        tokens. NoGrammarsError if the library does not read this tokenizer."""
        return cls._extending(Tokenizer.from_str(tokenizer.to_str()), vocab_size)

    @classmethod
    def from_file(cls, path: Path, vocab_size: int) -> "GrammarVocabulary":
        """That of a `tokenizer.json`. Holds the interpreter for half a second for 100,000 tokens.
        NoGrammarsError if there is no such file, or no library reads it."""
        if not path.is_file():
            raise NoGrammarsError(f"{path}: no such file")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:
            # The tokenizer library raises bare exceptions.
            raise NoGrammarsError(first_line(error)) from error
        return cls._extending(tokenizer, vocab_size)

    @classmethod
    def _extending(cls, extended: Tokenizer, vocab_size: int) -> "GrammarVocabulary":
        """From a tokenizer that nothing else uses; it is changed."""
        # Settings of a training run, saved with the vocabulary.
        extended.no_truncation()
        extended.no_padding()
        extended.add_special_tokens([AddedToken(_END, special=True, normalized=False)])
        end_id = extended.token_to_id(_END)
        assert end_id is not None
        try:
            size = max(vocab_size, end_id + 1)
            special = LLTokenizer(extended.to_str(), n_vocab=size, eos_token=end_id)
            # The library takes any object with the members of its own wrapper.
            wrapper = cast(TokenizerWrapper, PlainTokenizer(special))
            plain = LLTokenizer(wrapper, n_vocab=size, eos_token=end_id)
            return cls(plain, special, end_id)
        except ValueError as error:
            raise NoGrammarsError(first_line(error)) from error

    def compile(self, definition: str) -> LLMatcher:
        """A matcher at the start of a grammar; copies of it are cheap. Releases the interpreter.
        Those of requests need a thread of `compiler_threads`. GrammarError if the grammar is
        invalid or exceeds a limit."""
        matcher = LLMatcher(self.tokenizer, definition, log_level=_QUIET, limits=_LIMITS)
        if matcher.is_error():
            raise GrammarError(matcher.get_error())
        return matcher


def compiler_threads(num_threads: int, name: str, niceness: int = 0) -> ThreadPoolExecutor:
    """Threads whose stacks are large enough for every format. With a niceness they leave the
    processor to the other threads, on Linux."""
    threads = ThreadPoolExecutor(num_threads, name, partial(_be_nice, niceness))
    all_started = threading.Barrier(num_threads)
    previous = threading.stack_size(_STACK_BYTES)
    try:
        started = [threads.submit(all_started.wait) for _ in range(num_threads)]
    finally:
        threading.stack_size(previous)
    for one in started:
        one.result()
    return threads


def _be_nice(niceness: int) -> None:
    """Lower this thread's priority; elsewhere than on Linux it would be the process's."""
    if niceness and sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)


def is_rejection(error: str) -> bool:
    """Whether a matcher's error says that a token does not follow the grammar, and not that the
    library has reached a limit."""
    return _REJECTION in error


def first_line(error: object) -> str:
    return str(error).partition("\n")[0]


def summary(error: object) -> str:
    """The first line, and the one with the error of a regular expression; the others show the
    grammar, with the places of errors."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    errors = [line for line in lines[1:] if line.startswith("error:")]
    return " ".join([lines[0], *errors][:2])
