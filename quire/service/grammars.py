"""Grammars of llguidance: the vocabulary that they read, matchers with limits, and the threads that
compile them, with the queue of what waits.

Gateways compile a grammar to check it, workers to follow it; both must decide alike.
"""

import json
import os
import re
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Generic, TypeVar, cast

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer, decoders

from quire.service.plain_tokenizer import PlainTokenizer

T = TypeVar("T")

# Without texts of the parser's state in errors: they hold the output. The fuel bounds the work at
# the start of a grammar: with the library's million, `(a{1000}){1000}` takes a second. The other
# limits are the library's.
_LIMITS: Final[dict[str, Any]] = {"verbose_errors": False, "initial_lexer_fuel": 250_000}
_QUIET: Final = 0
_PANIC: Final = "PanicException"
_REJECTION: Final = "doesn't satisfy the grammar"
_TOO_MANY_STATES: Final = "too many states"
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
    def from_tokenizer(
        cls, tokenizer: Tokenizer, vocab_size: int, slices: list[str] | None = None
    ) -> "GrammarVocabulary":
        """`vocab_size` is the model's, which may exceed the tokenizer's. `slices` are expressions
        of texts whose masks are prepared, by default the library's; who computes few masks needs
        none. Holds the interpreter for a second for 150,000 tokens. NoGrammarsError if the library
        does not read this tokenizer."""
        content = tokenizer.to_str()
        is_limited = tokenizer.truncation is not None or tokenizer.padding is not None
        source = _readable(content) if is_limited or _has_metaspace(tokenizer) else content
        return cls._read(source, vocab_size, slices)

    @classmethod
    def from_file(cls, path: Path, vocab_size: int) -> "GrammarVocabulary":
        """That of a `tokenizer.json`; else as `from_tokenizer`. NoGrammarsError if there is no such
        file, or the library does not read it."""
        try:
            content = path.read_bytes()
        except OSError as error:
            raise NoGrammarsError(f"{path}: {error.strerror}") from error
        if _is_limited(content) or b'"Metaspace"' in content:
            return cls._read(_readable(content.decode(errors="replace")), vocab_size)
        # As text it would be in memory several times.
        return cls._read(str(path.resolve()), vocab_size)

    @classmethod
    def _read(
        cls, source: str, vocab_size: int, slices: list[str] | None = None
    ) -> "GrammarVocabulary":
        """From the content of a `tokenizer.json`, or its absolute path."""
        special = _special_tokenizer(source, vocab_size)
        tokenizer = PlainTokenizer(special)
        # The library takes any object with the members of its own wrapper.
        plain = LLTokenizer(cast(TokenizerWrapper, tokenizer), slices=slices)
        tokenizer.forget_tokens()
        return cls(plain, special, tokenizer.eos_token_id)

    def compile(self, definition: str, max_lexer_states: int | None = None) -> LLMatcher:
        """A matcher at the start of a grammar; copies of it are cheap. Releases the interpreter.
        Those of requests need a thread of `compiler_threads`. GrammarError if the grammar is
        invalid or exceeds a limit.

        All copies share a lexer, whose states are added as outputs need them and stay as long as
        one of the copies: more than `max_lexer_states`, by default the library's 250,000, are an
        error of the copy that needs another one."""
        limits = LLParserLimits(**_LIMITS, max_lexer_states=max_lexer_states)
        matcher = LLMatcher(self.tokenizer, definition, log_level=_QUIET, limits=limits)
        if matcher.is_error():
            raise GrammarError(matcher.get_error())
        return matcher


def _is_limited(content: bytes) -> bool:
    """Whether a `tokenizer.json` may have truncation or padding."""
    # Within a string the quotation marks would be escaped.
    return not all(
        re.search(rb'"%s"\s*:\s*null' % key, content) for key in (b"truncation", b"padding")
    )


def _has_metaspace(tokenizer: Tokenizer) -> bool:
    """Whether the decoder is that of older conversions of SentencePiece with byte fallback."""
    if tokenizer.decoder is None:
        return False
    # Its state is its part of `tokenizer.json`.
    decoder = json.loads(tokenizer.decoder.__getstate__())
    return {"ByteFallback", "Metaspace"} <= {part["type"] for part in decoder.get("decoders", [])}


def _readable(content: str) -> str:
    """A `tokenizer.json` as the library reads it. Without truncation and padding, which are
    settings of a training run, and with the newer decoder for the same texts in the place of
    Metaspace, which the library overlooks within a sequence: it reads the mark of a space as text.
    Takes half a second for 150,000 tokens, but few files need it."""
    try:
        tokenizer = Tokenizer.from_str(content)
    except Exception as error:
        # The tokenizer library raises bare exceptions.
        raise NoGrammarsError(first_line(error)) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if _has_metaspace(tokenizer):
        space = decoders.Replace("\N{LOWER ONE EIGHTH BLOCK}", " ")
        tokenizer.decoder = decoders.Sequence([space, decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer.to_str()


def _special_tokenizer(source: str, vocab_size: int) -> LLTokenizer:
    """The library's tokenizer of this size, or with all tokens if these are more. It computes no
    masks and needs no slices for them. NoGrammarsError if it cannot be read."""
    with suppress(ValueError), _no_panics():
        return LLTokenizer(source, n_vocab=vocab_size, slices=[])
    # It has more tokens, or is not readable.
    try:
        with _no_panics():
            return LLTokenizer(source, slices=[])
    except ValueError as error:
        raise NoGrammarsError(first_line(error)) from error


@contextmanager
def _no_panics() -> Iterator[None]:
    """Raise NoGrammarsError in place of the library's panics, which are not of the class
    Exception: they show that it does not expect such a tokenizer."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != _PANIC:
            raise
        raise NoGrammarsError(first_line(error)) from error


def compiler_threads(num_threads: int, name: str, niceness: int = 0) -> ThreadPoolExecutor:
    """Threads whose stacks are large enough for every format. With a niceness they leave the
    processor to the other threads, on Linux. RuntimeError if the system refuses one of them."""
    threads = ThreadPoolExecutor(num_threads, name, partial(_be_nice, niceness))
    all_started = threading.Barrier(num_threads)
    previous = threading.stack_size(_STACK_BYTES)
    try:
        started = [threads.submit(all_started.wait) for _ in range(num_threads)]
    except RuntimeError:
        # The process could not end while the others wait.
        all_started.abort()
        threads.shutdown(wait=False)
        raise
    finally:
        threading.stack_size(previous)
    for one in started:
        one.result()
    return threads


def _be_nice(niceness: int) -> None:
    """Lower this thread's priority; elsewhere than on Linux it would be the process's."""
    if niceness and sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)


class RoundRobin(Generic[T]):
    """A queue that serves principals round robin, the oldest item of each first. Not
    thread-safe."""

    def __init__(self) -> None:
        # The next principal first; without those that have no items.
        self._waiting: OrderedDict[str, deque[T]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, principal: str, item: T) -> None:
        self._waiting.setdefault(principal, deque()).append(item)

    def pop(self) -> T:
        """Remove the oldest item of the next principal. KeyError if there is none."""
        principal, items = self._waiting.popitem(last=False)
        item = items.popleft()
        if items:
            self._waiting[principal] = items
        return item


def is_rejection(error: str) -> bool:
    """Whether a matcher's error says that a token does not follow the grammar, and not that the
    library has reached a limit."""
    return _REJECTION in error


def has_too_many_states(error: str) -> bool:
    """Whether a matcher's error says that the lexer of all its copies has no room for a state."""
    return _TOO_MANY_STATES in error


def first_line(error: object) -> str:
    return str(error).partition("\n")[0]


def summary(error: object) -> str:
    """The first line, and the one with the error of a regular expression; the others show the
    grammar, with the places of errors."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    errors = [line for line in lines[1:] if line.startswith("error:")]
    return " ".join([lines[0], *errors][:2])
