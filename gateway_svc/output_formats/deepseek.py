"""DeepSeek's format of calls: that of V3 and R1, and that of V3.1."""

from gateway_svc.output_formats import json_text
from gateway_svc.output_formats.calls import CallWriter
from gateway_svc.output_formats.reader import Reader, Step

_BAR = "\N{FULLWIDTH VERTICAL LINE}"
CALLS_BEGIN = f"<{_BAR}tool▁calls▁begin{_BAR}>"
CALLS_END = f"<{_BAR}tool▁calls▁end{_BAR}>"
CALL_BEGIN = f"<{_BAR}tool▁call▁begin{_BAR}>"
CALL_END = f"<{_BAR}tool▁call▁end{_BAR}>"
SEPARATOR = f"<{_BAR}tool▁sep{_BAR}>"
MARKERS = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR)
_DROPPED = (CALL_END, CALLS_END, "```")


def deepseek(reader: Reader, calls: CallWriter) -> Step[None]:
    """A call begins with `function`, the separator, its name and a block of JSON; in V3.1 with its
    name, the separator and the JSON."""
    while start := (yield from calls.until_call((CALLS_BEGIN, CALL_BEGIN), _DROPPED)):
        if start == CALLS_BEGIN:
            yield from reader.skip_space()
            if (yield from reader.accept(CALL_BEGIN)) is None:
                calls.abandon()
                continue
        if not (yield from _call(reader, calls)):
            calls.abandon()


def _call(reader: Reader, calls: CallWriter) -> Step[bool]:
    """Whether it is a call, or was abandoned as one whose arguments are no object."""
    name = yield from _until(reader, SEPARATOR)
    if name is None:
        return False
    if name.strip() == "function":
        name = yield from _until(reader, "```json")
    if name is None or not name.strip():
        return False
    yield from reader.skip_space()
    if (yield from reader.peek()) != "{":
        return False
    calls.start(name.strip())
    if not (yield from json_text.value(reader, calls.arguments)):
        return False
    calls.end()
    return True


def _until(reader: Reader, marker: str) -> Step[str | None]:
    """The text before a marker, which is consumed; None if another marker comes first."""
    parts: list[str] = []
    if not (yield from reader.until((marker, CALL_BEGIN, CALL_END, CALLS_END), parts.append)):
        return None
    if (yield from reader.accept(marker)) is None:
        return None
    return "".join(parts)
