"""Spans that have ended, and the interface of what exports them. Without OpenTelemetry."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from quire.service.tracing.context import TraceContext

AttributeValue: TypeAlias = str | bool | int | float | Sequence[str]


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """A moment within a span."""

    name: str
    time_ns: int  # Unix time
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EndedSpan:
    """A span of a sampled trace, made at its end. Times are Unix times."""

    name: str
    context: TraceContext
    # None: the first span of its trace.
    parent: TraceContext | None
    start_ns: int
    end_ns: int
    attributes: Mapping[str, AttributeValue]
    events: Sequence[SpanEvent] = ()
    # Why it failed; None if it has not.
    error: str | None = None
    # It serves a call of another process.
    is_server: bool = False


class SpanExporter(Protocol):
    """Takes spans without blocking; it may lose them, but never raises an error."""

    def export(self, span: EndedSpan) -> None: ...

    async def close(self) -> None:
        """Send what is left, within a bounded time."""
