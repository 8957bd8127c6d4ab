"""Compiles grammars in threads, and keeps the ones used last."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Final

import structlog
from llguidance import LLMatcher

from quire.service.grammars import GrammarVocabulary, compiler_threads
from worker_svc.plan.plans import Plan

log = structlog.get_logger()

# A compiled grammar takes 10 kB to some MB.
_MAX_GRAMMARS: Final = 128
_NUM_THREADS: Final = 2
# Below the threads of the forward pass, which other rows need.
_NICENESS: Final = 10


class GrammarCompiler:
    """Compiled grammars by their definitions. All methods may be called on any thread."""

    def __init__(
        self,
        read_vocabulary: Callable[[], GrammarVocabulary],
        max_grammars: int = _MAX_GRAMMARS,
    ) -> None:
        """`read_vocabulary` is called once, before the first grammar is compiled."""
        self._read_vocabulary = read_vocabulary
        self._vocabulary: GrammarVocabulary | None = None
        self._vocabulary_lock = threading.Lock()
        self._max_grammars = max_grammars
        self._threads = compiler_threads(_NUM_THREADS, "grammar", _NICENESS)
        self._lock = threading.Lock()
        # The ones used last at the end.
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._compiled)

    @property
    def vocabulary(self) -> GrammarVocabulary:
        """Read at the first use: it takes a second and more than 100 MB for 150,000 tokens, which
        a worker without grammars should not pay. NoGrammarsError if it cannot be read."""
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = self._read_vocabulary()
            return self._vocabulary

    def prepare(self, definition: str) -> Future[LLMatcher]:
        """Start to compile a grammar, unless it is there. The future's matcher is at the start of
        the grammar, for copies; its error is a GrammarError, or that of the vocabulary."""
        with self._lock:
            compiled = self._compiled.pop(definition, None)
            if compiled is None:
                compiled = self._threads.submit(self._compile, definition)
            self._compiled[definition] = compiled
            while len(self._compiled) > self._max_grammars:
                self._compiled.popitem(last=False)
            return compiled

    def prepare_for(self, plan: Plan) -> None:
        """Start to compile the grammars of a plan that has arrived, which may still have to wait
        for the steps before it."""
        for admission in plan.admissions:
            params = admission.logits_params
            if params is not None and params.grammar is not None:
                self.prepare(params.grammar.definition)

    def _compile(self, definition: str) -> LLMatcher:
        return self.vocabulary.compile(definition)


def find_grammars(folder: Path, vocab_size: int) -> GrammarCompiler | None:
    """The compiler for a model's tokenizer, which is not read yet; None, with a line in the log, if
    there is none. Rows with grammars fail then; gateways refuse such requests."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        log.info("no structured output", reason=f"{path}: no such file")
        return None
    return GrammarCompiler(partial(GrammarVocabulary.from_file, path, vocab_size))
