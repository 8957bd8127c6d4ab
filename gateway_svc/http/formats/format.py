"""What the formats of output have in common."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gateway_svc.generation.choice import ChoiceEnd, ChoiceUpdate
from gateway_svc.http.errors import HttpError
from gateway_svc.scheduler.events import TokenLogprobs
from gateway_svc.text.served_model import Model
from quire.internal.v1 import gateway_pb2


@dataclass(frozen=True)
class Usage:
    """Tokens of all prompts together."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


@dataclass(frozen=True)
class ServerEvent:
    """An event of a stream. `name` is for clients that subscribe to events by name."""

    data: dict[str, Any]
    name: str | None = None


@dataclass
class ToolCall:
    """A call of a tool, collected from its deltas."""

    id: str
    name: str
    arguments: list[str] = field(default_factory=list)


@dataclass
class Output:
    """The output of one choice, collected from its updates."""

    texts: list[str] = field(default_factory=list)
    reasoning_texts: list[str] = field(default_factory=list)
    # By index.
    tool_calls: list[ToolCall] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    updates: list[ChoiceUpdate] = field(default_factory=list)
    end: ChoiceEnd | None = None
    # Of the prompt, one per token; None unless requested.
    prompt_logprobs: Sequence[TokenLogprobs] | None = None
    # None unless requested.
    prompt_token_ids: list[int] | None = None

    def add(self, update: ChoiceUpdate) -> None:
        self.texts.append(update.text)
        self.reasoning_texts.append(update.reasoning)
        for delta in update.tool_calls:
            if delta.id is not None:
                self.tool_calls.append(ToolCall(delta.id, delta.name or ""))
            self.tool_calls[delta.index].arguments.append(delta.arguments)
        self.token_ids += update.token_ids
        if update.logprobs or update.pieces:
            self.updates.append(update)
        self.end = update.end or self.end

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def reasoning(self) -> str:
        return "".join(self.reasoning_texts)


class Format(Protocol):
    """Renders the output of one HTTP request. Choices are numbered across its prompts."""

    def first_events(
        self, choices: Iterable[int], prompt_token_ids: list[int] | None
    ) -> Iterable[ServerEvent]:
        """Events before the first token of a prompt's choices, with the ids of the prompt's tokens
        if they are requested."""

    def events(
        self, index: int, update: ChoiceUpdate, usage: Callable[[], Usage]
    ) -> Iterable[ServerEvent]:
        """Events of a choice's update; `usage` returns that until now, which few clients want."""

    def last_events(self, usage: Usage) -> Iterable[ServerEvent]:
        """Events after the end of all choices."""

    def error_events(self, error: HttpError) -> Iterable[ServerEvent]:
        """Events of an error that ends the stream; none if the error's own object suffices."""

    def body(self, outputs: Sequence[Output], usage: Usage) -> dict[str, Any]:
        """The response of a request without a stream."""


def finish_reason(end: ChoiceEnd | None) -> str | None:
    if end is None:
        return None
    if not end.is_stop:
        return "length"
    return "tool_calls" if end.has_calls else "stop"


def stop_reason(
    end: ChoiceEnd | None, model: Model, state: gateway_pb2.HttpState
) -> str | int | None:
    """The stop string, or the id of the stop token, that ended a choice. As in vLLM it is None for
    the end-of-sequence tokens of the model."""
    if end is None:
        return None
    if end.stop_string is not None:
        return end.stop_string
    is_end = not state.ignore_eos and end.stop_token_id in model.files.eos_token_ids
    return None if is_end else end.stop_token_id
