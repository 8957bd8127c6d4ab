"""Reports what the engine does with requests to their traces; without a trace it does nothing."""

from collections.abc import Iterable

from quire.service.tracing.spans import SpanExporter
from scheduler_svc.core.sequence import Group, Sequence
from scheduler_svc.tracing.request_trace import SCHEDULER_CHANGED, Phase, begin_trace


def begin_queue(group: Group, exporter: SpanExporter | None) -> None:
    """A new request is queued."""
    _wait(group, exporter, Phase.QUEUE)


def continue_trace(group: Group, exporter: SpanExporter | None) -> None:
    """A request is queued that an earlier term had. Phases that have begun go on."""
    _wait(group, exporter, Phase.RECOVERY, SCHEDULER_CHANGED)


def lose_worker(group: Group, lost: Iterable[Sequence], worker: str) -> None:
    """The lane of these sequences has ended; `worker` is its address."""
    if group.trace is not None:
        for sequence in lost:
            group.trace.lose_worker(sequence.choice, sequence.num_output_tokens, worker)


def end_sequence(sequence: Sequence) -> None:
    """A sequence has ended, and was delivered."""
    trace, end = sequence.group.trace, sequence.end
    if trace is not None and end is not None:
        trace.end(sequence.choice, end.num_output_tokens, end.reason.value)


def fail_request(group: Group) -> None:
    """A request has ended with an error."""
    if group.trace is not None and group.error is not None:
        group.trace.fail(group.error.code.name)


def move_request(group: Group, shard: int) -> None:
    """A waiting request was given to another shard."""
    if group.trace is not None:
        group.trace.move(shard)


def _wait(
    group: Group, exporter: SpanExporter | None, phase: Phase, cause: str | None = None
) -> None:
    record = group.record
    if group.trace is None:
        group.trace = begin_trace(
            exporter, record.trace_context, record.key.request_id, len(group.outputs)
        )
    if group.trace is not None:
        for sequence in group.outputs:
            # The others are forked from the first.
            if sequence.is_first or sequence.num_output_tokens:
                group.trace.wait(sequence.choice, phase, cause)
