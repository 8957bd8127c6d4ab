"""The events of a stream of completions: chunks of choices, and of the usage."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gateway_svc.http.formats.format import ServerEvent, Usage
from quire.internal.v1 import gateway_pb2


class Chunks:
    """Makes the chunks of one stream. If any of them may have a usage, all have the field."""

    def __init__(self, fixed: Mapping[str, Any], state: gateway_pb2.HttpState) -> None:
        """`fixed`: the fields that are the same in each chunk."""
        self._fixed = fixed
        self._state = state

    def of(self, choice: dict[str, Any]) -> ServerEvent:
        """A chunk before the first token of a choice."""
        return self._event([choice], None)

    def of_update(self, choice: dict[str, Any], usage: Callable[[], Usage]) -> ServerEvent:
        """The chunk of an update, with the usage until now if the client wants it in each."""
        return self._event([choice], usage() if self._state.continuous_usage else None)

    def last(self, usage: Usage) -> Iterable[ServerEvent]:
        """The chunk without a choice that has the usage, if the client wants it."""
        if self._state.include_usage:
            yield self._event([], usage)

    def _event(self, choices: list[dict[str, Any]], usage: Usage | None) -> ServerEvent:
        data = {**self._fixed, "choices": choices}
        if self._state.include_usage or self._state.continuous_usage:
            data["usage"] = None if usage is None else usage.to_json()
        return ServerEvent(data)
