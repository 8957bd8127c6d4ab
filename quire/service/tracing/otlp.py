"""Exports spans over OTLP with OpenTelemetry's SDK, from a thread of its own.

The SDK reads the standard variables: OTEL_EXPORTER_OTLP_* (headers, certificates, compression,
timeout), OTEL_BSP_* (batches) and OTEL_RESOURCE_ATTRIBUTES.
"""

import asyncio
import importlib.metadata
import os
import uuid
from threading import Thread
from typing import Final

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)

from quire.service.tracing.context import TraceContext
from quire.service.tracing.spans import EndedSpan

# For the spans that are left when the service ends.
CLOSE_S: Final = 1.0
_SERVICE_NAME: Final = "OTEL_SERVICE_NAME"


class _GivenIds(IdGenerator):
    """The ids of the next span: they are known before the SDK's span is made."""

    def __init__(self) -> None:
        self.trace_id = self.span_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id

    def generate_span_id(self) -> int:
        return self.span_id


class OtlpExporter:
    """A `SpanExporter`. Spans beyond the SDK's queue are dropped; `export` never waits."""

    def __init__(self, service: str, endpoint: str | None) -> None:
        """`endpoint` is that of the receiver; None: that of the standard variables."""
        self._ids = _GivenIds()
        self._exporter = OTLPSpanExporter(endpoint=endpoint)
        self._processor = BatchSpanProcessor(self._exporter)
        # Neither global nor closed at the exit of the process, which that could delay.
        provider = TracerProvider(
            sampler=ALWAYS_ON,
            resource=_resource(service),
            shutdown_on_exit=False,
            id_generator=self._ids,
        )
        provider.add_span_processor(self._processor)
        self._tracer = provider.get_tracer("quire", _version())

    def export(self, span: EndedSpan) -> None:
        self._ids.trace_id, self._ids.span_id = span.context.trace_id, span.context.span_id
        parent = None if span.parent is None else NonRecordingSpan(_span_context(span.parent))
        started = self._tracer.start_span(
            span.name,
            # An empty context otherwise: no other library's span is the parent.
            set_span_in_context(parent or NonRecordingSpan(_NO_SPAN)),
            SpanKind.SERVER if span.is_server else SpanKind.INTERNAL,
            dict(span.attributes),
            start_time=span.start_ns,
        )
        for event in span.events:
            started.add_event(event.name, dict(event.attributes), event.time_ns)
        if span.error is not None:
            started.set_status(Status(StatusCode.ERROR, span.error))
        started.end(span.end_ns)

    async def close(self) -> None:
        """Send what is left, for a second at most. The SDK alone waits for a receiver that is
        absent for 30 s."""
        closing = Thread(target=self._processor.shutdown, daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, CLOSE_S)
        if closing.is_alive():
            # Ends a call in progress.
            self._exporter.shutdown()


_NO_SPAN: Final = SpanContext(0, 0, is_remote=False)


def _span_context(context: TraceContext) -> SpanContext:
    return SpanContext(
        context.trace_id,
        context.span_id,
        is_remote=True,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
        trace_state=TraceState.from_header([context.tracestate]) if context.tracestate else None,
    )


def _resource(service: str) -> Resource:
    own = {"service.instance.id": str(uuid.uuid4()), "service.version": _version()}
    if not os.environ.get(_SERVICE_NAME):
        own["service.name"] = f"quire-{service}"
    return Resource.create(own)


def _version() -> str:
    return importlib.metadata.version("quire")
