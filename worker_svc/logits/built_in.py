"""The logits processors of a worker, in the order in which they change logits."""

from collections.abc import Callable, Mapping
from typing import Final

from worker_svc.grammar.processor import GrammarProcessor
from worker_svc.logits.bad_words import BadWords
from worker_svc.logits.logit_bias import LogitBias
from worker_svc.logits.masks import AllowedTokens, MinTokens
from worker_svc.logits.penalties import Penalties
from worker_svc.logits.pipeline import LogitsPipeline
from worker_svc.logits.processor import LogitsProcessor, ProcessorContext
from worker_svc.logits.typical_p import TypicalP

ProcessorFactory = Callable[[ProcessorContext], LogitsProcessor]
# Masks first: what they exclude stays impossible, whatever is added or multiplied behind them.
_BUILT_IN: Final[tuple[ProcessorFactory, ...]] = (
    AllowedTokens,
    GrammarProcessor,
    BadWords,
    MinTokens,
    LogitBias,
    Penalties,
)


def make_pipeline(
    context: ProcessorContext, own: Mapping[str, ProcessorFactory] | None = None
) -> LogitsPipeline:
    """The built-in processors, then a worker's own ones, by name."""
    return LogitsPipeline(
        [make(context) for make in _BUILT_IN],
        TypicalP(context),
        context.max_num_seqs,
        {name: make(context) for name, make in (own or {}).items()},
    )
