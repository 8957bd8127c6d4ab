"""A receiver of OTLP over gRPC that keeps the spans it gets."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue


@dataclass(frozen=True)
class ReceivedSpan:
    name: str
    service: str
    trace_id: str
    span_id: str
    parent_span_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: tuple[str, ...]
    # Of opentelemetry.proto.trace.v1.Status.
    status: int


class OtlpReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        # Of every call.
        self.metadata: list[dict[str, str]] = []
        self.endpoint = ""
        self._server: grpc.Server | None = None

    def start(self, server: grpc.Server) -> None:
        self._server = server
        self.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()

    def stop(self) -> None:
        """End all connections; the endpoint refuses new ones."""
        assert self._server is not None
        self._server.stop(None).wait()

    def Export(  # noqa: N802
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        self.metadata.append({str(k): str(v) for k, v in context.invocation_metadata()})
        for group in request.resource_spans:
            service = _attributes(group.resource.attributes)["service.name"]
            for span in (span for scope in group.scope_spans for span in scope.spans):
                received = ReceivedSpan(
                    span.name,
                    service,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    _attributes(span.attributes),
                    tuple(event.name for event in span.events),
                    span.status.code,
                )
                self.spans.append(received)
        return trace_service_pb2.ExportTraceServiceResponse()

    def of_trace(self, trace_id: str) -> list[ReceivedSpan]:
        """The spans of a trace, in the order in which they began."""
        found = [span for span in self.spans if span.trace_id == trace_id]
        return sorted(found, key=lambda span: span.start_ns)


@contextmanager
def otlp_receiver() -> Iterator[OtlpReceiver]:
    """A receiver that serves, at `endpoint`, until the end of the context."""
    receiver = OtlpReceiver()
    with ThreadPoolExecutor(1) as threads:
        server = grpc.server(threads)
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)
        receiver.start(server)
        try:
            yield receiver
        finally:
            receiver.stop()


def _attributes(pairs: "list[KeyValue]") -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return None if kind is None else getattr(value, kind)
