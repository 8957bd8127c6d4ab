"""The trace of a call: continued from its headers, or begun here."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

import structlog

from quire.service.tracing.context import TRACEPARENT, TRACESTATE, TraceContext
from quire.service.tracing.spans import AttributeValue, EndedSpan, SpanEvent, SpanExporter


class CallTrace:
    """What is known of one call, until its span is made at its end."""

    def __init__(self, context: TraceContext, is_recorded: bool, name: str) -> None:
        # That of its span; the client's own if no spans are exported here.
        self.context = context
        # Attributes are worth collecting.
        self.is_recorded = is_recorded
        self.name = name
        self.attributes: dict[str, AttributeValue] = {}
        self.events: list[SpanEvent] = []
        self.error: str | None = None

    def set(self, attributes: Mapping[str, AttributeValue | None]) -> None:
        """Set attributes, without those that are None."""
        self.attributes.update({k: v for k, v in attributes.items() if v is not None})

    def count(self, attributes: Mapping[str, int]) -> None:
        """Add to attributes that are sums over the generations of the call."""
        for name, value in attributes.items():
            before = self.attributes.get(name, 0)
            assert isinstance(before, int)
            self.attributes[name] = before + value

    def append(self, name: str, values: list[str]) -> None:
        """Add to an attribute that is a list over the generations of the call."""
        before = self.attributes.get(name, [])
        assert isinstance(before, list)
        self.attributes[name] = before + values


# Like structlog's: a call runs in a task of its own, and those that it starts inherit it.
_CURRENT: Final[ContextVar[CallTrace | None]] = ContextVar("call_trace", default=None)


def current_trace() -> CallTrace | None:
    """The trace of the call that this task serves; None if it has none."""
    return _CURRENT.get()


class CallTracing:
    """Opens the traces of calls."""

    def __init__(self, exporter: SpanExporter | None, sampling_ratio: float) -> None:
        """Without an exporter a client's context is only passed on. `sampling_ratio`: share of the
        traces begun here that are recorded; a client's decision is kept."""
        self._exporter = exporter
        self._sampling_ratio = sampling_ratio

    @contextmanager
    def call(self, name: str, headers: Mapping[str, str]) -> Iterator[CallTrace | None]:
        """Trace a call; None if there is no context. `headers` have names in lower case. Records of
        the log have the trace's id within the block."""
        parent = TraceContext.parse(headers.get(TRACEPARENT, ""), headers.get(TRACESTATE, ""))
        context = self._context(parent)
        if context is None:
            yield None
            return
        is_recorded = self._exporter is not None and context.is_sampled
        trace, start_ns = CallTrace(context, is_recorded, name), time.time_ns()
        token = _CURRENT.set(trace)
        try:
            with structlog.contextvars.bound_contextvars(trace_id=context.trace_id_hex):
                yield trace
        finally:
            _CURRENT.reset(token)
            if is_recorded:
                self._export(trace, parent, start_ns)

    def _context(self, parent: TraceContext | None) -> TraceContext | None:
        if self._exporter is None:
            return parent
        return TraceContext.begin(self._sampling_ratio) if parent is None else parent.child()

    def _export(self, trace: CallTrace, parent: TraceContext | None, start_ns: int) -> None:
        assert self._exporter is not None
        span = EndedSpan(
            trace.name,
            trace.context,
            parent,
            start_ns,
            time.time_ns(),
            trace.attributes,
            trace.events,
            trace.error,
            is_server=True,
        )
        self._exporter.export(span)
