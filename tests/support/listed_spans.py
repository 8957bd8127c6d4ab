"""A receiver of spans within the test's process, without OpenTelemetry."""

from quire.service.tracing.spans import EndedSpan


class ListedSpans:
    """A `SpanExporter` that keeps the spans in the order in which they ended."""

    def __init__(self) -> None:
        self.spans: list[EndedSpan] = []
        self.is_closed = False

    def export(self, span: EndedSpan) -> None:
        self.spans.append(span)

    async def close(self) -> None:
        self.is_closed = True

    def names(self, choice: int | None = None) -> list[str]:
        """The names of the spans; of one choice, where a request has several."""
        return [
            span.name
            for span in self.spans
            if choice is None or span.attributes.get("quire.choice") == choice
        ]

    def only(self, name: str) -> EndedSpan:
        [found] = [span for span in self.spans if span.name == name]
        return found
