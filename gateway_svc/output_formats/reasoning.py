"""Reasoning between a pair of markers at the start of the output."""

from collections.abc import Callable
from dataclasses import dataclass

from gateway_svc.output_formats.reader import Reader, Step


@dataclass(frozen=True)
class Markers:
    start: str
    end: str


def read_reasoning(
    reader: Reader,
    markers: Markers,
    is_open: bool,
    emit: Callable[[str], object],
    set_reasoning: Callable[[bool], object],
) -> Step[None]:
    """Pass on the reasoning, without line feeds around it, and consume it with its markers and the
    line feeds behind them. `is_open` if the prompt has the first marker. `set_reasoning` is called
    where the reasoning begins and ends."""
    reader.mark()
    yield from reader.skip_space()
    found = yield from reader.accept(markers.start)
    if found is None and not is_open:
        reader.put_back()
        return
    set_reasoning(True)
    yield from reader.while_in("\n")
    held = ""

    def emit_trimmed(text: str) -> None:
        nonlocal held
        text = held + text
        kept = text.rstrip("\n")
        held = text[len(kept) :]
        if kept:
            emit(kept)

    if (yield from reader.until((markers.end,), emit_trimmed)):
        yield from reader.accept(markers.end)
        set_reasoning(False)
        yield from reader.while_in("\n")
    elif held:
        emit(held)
