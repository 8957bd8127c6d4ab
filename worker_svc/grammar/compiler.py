"""Compiles grammars in threads, and keeps the ones used last."""

import threading
import weakref
from collections import OrderedDict
from concurrent.futures import Future
from pathlib import Path
from typing import Final

import structlog
from llguidance import LLMatcher

from quire.service.grammars import (
    GrammarError,
    GrammarVocabulary,
    NoGrammarsError,
    RoundRobin,
    compiler_threads,
)
from worker_svc.plan.logits_params import Grammar
from worker_svc.plan.plans import Plan

log = structlog.get_logger()

_MAX_GRAMMARS: Final = 128
# Of all their definitions: a compiled grammar takes 50 to 250 times as much as its definition, and
# up to 2 kB per state of its lexer.
_MAX_KEPT_CHARACTERS: Final = 2**21
# Of the lexer that all rows of a kept grammar share. A schema has some thousand.
_MAX_SHARED_STATES: Final = 2**14
_NUM_THREADS: Final = 2
# Below the threads of the forward pass, which other rows need.
_NICENESS: Final = 10


class _Compilation(Future[LLMatcher]):
    """A matcher that is or will be compiled."""

    def __init__(self, definition: str) -> None:
        super().__init__()
        self.definition = definition


class GrammarCompiler:
    """Compiled grammars by their definitions; principals whose grammars wait for a thread are
    served round robin. All methods may be called on any thread."""

    def __init__(
        self,
        vocabulary: GrammarVocabulary,
        max_grammars: int = _MAX_GRAMMARS,
        max_shared_states: int = _MAX_SHARED_STATES,
        max_kept_characters: int = _MAX_KEPT_CHARACTERS,
    ) -> None:
        self.vocabulary = vocabulary
        self._max_grammars = max_grammars
        self._max_shared_states = max_shared_states
        self._max_kept_characters = max_kept_characters
        self._threads = compiler_threads(_NUM_THREADS, "grammar", _NICENESS)
        # For rows in the middle of their output, for which a step waits.
        self._thread_of_steps = compiler_threads(1, "grammar-of-step")
        self._lock = threading.Lock()
        # The ones used last at the end.
        self._compiled: OrderedDict[str, _Compilation] = OrderedDict()
        # What waits for a thread. One may be there several times: for each principal that needs it,
        # so that none waits behind the grammars of another. It is compiled only if it is still kept
        # or a row waits for it: a client may cancel requests faster than their grammars compile.
        self._waiting = RoundRobin[weakref.ref[_Compilation]]()

    def __len__(self) -> int:
        return len(self._compiled)

    def prepare(self, grammar: Grammar) -> Future[LLMatcher]:
        """Start to compile a grammar, unless it is there. The future's matcher is at the start of
        the grammar, for copies; its error is a GrammarError."""
        definition = grammar.definition
        with self._lock:
            compiled = self._compiled.pop(definition, None) or _Compilation(definition)
            if not (compiled.running() or compiled.done()):
                self._waiting.put(grammar.principal, weakref.ref(compiled))
                self._threads.submit(self._compile_next)
            self._compiled[definition] = compiled
            while self._are_too_many():
                self._compiled.popitem(last=False)
            return compiled

    def _are_too_many(self) -> bool:
        """Whether fewer grammars have to be kept. The one used last always is."""
        num_kept = len(self._compiled)
        is_large = sum(map(len, self._compiled)) > self._max_kept_characters
        return num_kept > self._max_grammars or (is_large and num_kept > 1)

    def prepare_alone(self, definition: str, shared: Future[LLMatcher]) -> Future[LLMatcher]:
        """Start to compile a grammar for one row, with the library's limit of states: those of
        `shared` are used up. That one is not kept any more, so that the next rows share another."""
        with self._lock:
            if self._compiled.get(definition) is shared:
                del self._compiled[definition]
        return self._thread_of_steps.submit(self._compile, definition)

    def prepare_for(self, plan: Plan) -> None:
        """Start to compile the grammars of a plan that has arrived, which may still have to wait
        for the steps before it."""
        for admission in plan.admissions:
            params = admission.logits_params
            if params is not None and params.grammar is not None:
                self.prepare(params.grammar)

    def _compile_next(self) -> None:
        """Compile the next definition that waits, on a thread; one call was submitted for each."""
        with self._lock:
            compiled = self._waiting.pop()()
            if compiled is None or compiled.running() or compiled.done():
                return
            compiled.set_running_or_notify_cancel()
        try:
            matcher = self._compile(compiled.definition, self._max_shared_states)
        except Exception as error:
            # Raised again where the result is read.
            compiled.set_exception(error)
        else:
            compiled.set_result(matcher)

    def _compile(self, definition: str, max_states: int | None = None) -> LLMatcher:
        try:
            return self.vocabulary.compile(definition, max_states)
        except Exception:
            raise
        except BaseException as error:
            # A panic of the library, which is not of the class Exception: it would end the step of
            # all rows.
            log.error("the grammar library has panicked", exc_info=error)
            raise GrammarError(str(error)) from error


def find_grammars(folder: Path, vocab_size: int) -> GrammarCompiler | None:
    """The compiler for a model's tokenizer, whose vocabulary is read: that holds the interpreter
    for a second for 150,000 tokens, which no row should wait for. None, with a line in the log, if
    there is no tokenizer that the library reads. Rows with grammars fail then; gateways refuse such
    requests."""
    try:
        vocabulary = GrammarVocabulary.from_file(folder / "tokenizer.json", vocab_size)
    except NoGrammarsError as error:
        log.info("no structured output", reason=str(error))
        return None
    return GrammarCompiler(vocabulary)
