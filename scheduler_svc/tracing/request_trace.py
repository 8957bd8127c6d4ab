"""The spans of one request: the phases of its choices, each made when it ends.

A choice is in one phase at a time, so its spans follow one another without a gap. All are children
of the span that the request's context names; there is none that spans them, because a scheduler
that dies could not end it.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from quire.service.tracing.context import TraceContext
from quire.service.tracing.spans import AttributeValue, EndedSpan, SpanExporter

WORKER_LOST: Final = "worker lost"
SCHEDULER_CHANGED: Final = "scheduler changed"


class Phase(Enum):
    """What a choice does; the values are the names of its spans."""

    QUEUE = "queue"  # waits for its first row
    PREFILL = "prefill"  # computes its tokens, up to the next one that is sampled
    DECODE = "decode"
    SWAPPED = "swapped"  # is in host memory
    PREEMPTED = "preempted"  # waits for a row again, to be recomputed
    RECOVERY = "recovery"  # waits for a row again, after its worker or its scheduler was lost


_RUNNING: Final = (Phase.PREFILL, Phase.DECODE, Phase.SWAPPED)


@dataclass(frozen=True, slots=True)
class _OpenSpan:
    phase: Phase
    start_ns: int
    attributes: Mapping[str, AttributeValue]


class RequestTrace:
    """The phases of a request whose trace is sampled."""

    def __init__(
        self,
        exporter: SpanExporter,
        context: TraceContext,
        request_id: str,
        num_choices: int,
    ) -> None:
        self._exporter = exporter
        self._context = context
        self._request_id = request_id
        self._num_choices = num_choices
        # By choice.
        self._open: dict[int, _OpenSpan] = {}

    def enter(
        self,
        choice: int,
        phase: Phase,
        num_output_tokens: int,
        attributes: Mapping[str, AttributeValue] | None = None,
    ) -> None:
        """End the choice's phase, if it has one, and begin another one."""
        now_ns = time.time_ns()
        self._end(choice, now_ns, {"quire.output_tokens": num_output_tokens})
        self._open[choice] = _OpenSpan(phase, now_ns, attributes or {})

    def wait(self, choice: int, phase: Phase, cause: str | None = None) -> None:
        """Begin a wait for a row, unless the choice is in a phase already."""
        if choice not in self._open:
            self.enter(choice, phase, 0, {} if cause is None else {"quire.cause": cause})

    def lose_worker(self, choice: int, num_output_tokens: int, worker: str) -> None:
        """Note that a choice has to be recovered, if it had a row or was swapped."""
        span = self._open.get(choice)
        if span is not None and span.phase in _RUNNING:
            lost = {"quire.cause": WORKER_LOST, "quire.lost_worker": worker}
            self.enter(choice, Phase.RECOVERY, num_output_tokens, lost)

    def end(self, choice: int, num_output_tokens: int, reason: str | None) -> None:
        """End the last phase of a choice; `reason`: why it ended, None if the request failed."""
        attributes: dict[str, AttributeValue] = {"quire.output_tokens": num_output_tokens}
        if reason is not None:
            attributes["quire.finish_reason"] = reason
        self._end(choice, time.time_ns(), attributes)

    def fail(self, code: str) -> None:
        """End what is left of a request that has failed with this status."""
        now_ns = time.time_ns()
        for choice in list(self._open):
            self._end(choice, now_ns, {"error.type": code}, code)

    def move(self, shard: int) -> None:
        """End what is left of a request that another shard gets."""
        now_ns = time.time_ns()
        for choice in list(self._open):
            self._end(choice, now_ns, {"quire.moved_to_shard": shard})

    def _end(
        self,
        choice: int,
        now_ns: int,
        attributes: Mapping[str, AttributeValue],
        error: str | None = None,
    ) -> None:
        span = self._open.pop(choice, None)
        if span is None:
            return
        all_attributes = {"quire.request_id": self._request_id, **span.attributes, **attributes}
        if self._num_choices > 1:
            all_attributes["quire.choice"] = choice
        context = self._context.child()
        ended = EndedSpan(
            span.phase.value,
            context,
            self._context,
            span.start_ns,
            now_ns,
            all_attributes,
            error=error,
        )
        self._exporter.export(ended)


def begin_trace(
    exporter: SpanExporter | None, context: TraceContext | None, request_id: str, num_choices: int
) -> RequestTrace | None:
    """The trace of a request; None if its spans are not exported."""
    if exporter is None or context is None or not context.is_sampled:
        return None
    return RequestTrace(exporter, context, request_id, num_choices)
