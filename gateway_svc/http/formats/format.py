"""What the formats of output have in common."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gateway_svc.generation.choice import ChoiceEnd, ChoiceUpdate
from gateway_svc.scheduler.events import TokenLogprobs


@dataclass(frozen=True)
class Usage:
    """Tokens of all prompts together."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True)
class ServerEvent:
    """An event of a stream. `name` is for clients that subscribe to events by name."""

    data: dict[str, Any]
    name: str | None = None


@dataclass
class Output:
    """The output of one choice, collected from its updates."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    updates: list[ChoiceUpdate] = field(default_factory=list)
    end: ChoiceEnd | None = None
    # Of the prompt, one per token; None unless requested.
    prompt_logprobs: Sequence[TokenLogprobs] | None = None

    def add(self, update: ChoiceUpdate) -> None:
        self.texts.append(update.text)
        self.token_ids += update.token_ids
        if update.logprobs:
            self.updates.append(update)
        self.end = update.end or self.end

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Format(Protocol):
    """Renders the output of one HTTP request. Choices are numbered across its prompts."""

    def first_events(self, choices: Iterable[int]) -> Iterable[ServerEvent]:
        """Events before the first token of a prompt's choices."""

    def events(self, index: int, update: ChoiceUpdate, usage: Usage) -> Iterable[ServerEvent]:
        """Events of a choice's update; `usage` is that until now."""

    def last_events(self, usage: Usage) -> Iterable[ServerEvent]:
        """Events after the end of all choices."""

    def body(self, outputs: Sequence[Output], usage: Usage) -> dict[str, Any]:
        """The response of a request without a stream."""


def finish_reason(end: ChoiceEnd | None) -> str | None:
    if end is None:
        return None
    return "stop" if end.is_stop else "length"


def stop_reason(end: ChoiceEnd | None) -> str | int | None:
    """The stop string or token id that ended a choice, as vLLM reports it."""
    if end is None:
        return None
    return end.stop_string if end.stop_string is not None else end.stop_token_id
