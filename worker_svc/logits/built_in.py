"""The built-in logits processors, in the order in which they change logits."""

from worker_svc.grammar.processor import GrammarProcessor
from worker_svc.logits.logit_bias import LogitBias
from worker_svc.logits.pipeline import LogitsPipeline
from worker_svc.logits.processor import ProcessorContext

_BUILT_IN = (GrammarProcessor, LogitBias)


def make_pipeline(context: ProcessorContext) -> LogitsPipeline:
    """The pipeline of a worker."""
    return LogitsPipeline([make(context) for make in _BUILT_IN], context.max_num_seqs)
