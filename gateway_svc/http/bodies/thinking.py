"""Reasoning of earlier responses as parts of a message's content: Anthropic's form, which litellm
uses in chats, too."""

from collections.abc import Iterable
from typing import Literal

from gateway_svc.http.bodies.fields import Hint, HttpRequest


class ThinkingBlock(HttpRequest):
    """Reasoning of an earlier response."""

    type: Literal["thinking"]
    thinking: str
    # Nothing is signed here, and so nothing is checked.
    signature: str | None = None
    cache_control: Hint | None = None


class RedactedThinkingBlock(HttpRequest):
    """Reasoning that another server has encrypted. The model does not get it."""

    type: Literal["redacted_thinking"]
    data: str
    cache_control: Hint | None = None


def reasoning_of(parts: Iterable[object]) -> str | None:
    """The reasoning among the parts, which line feeds separate; None if there is none."""
    thoughts = [part.thinking for part in parts if isinstance(part, ThinkingBlock)]
    return "\n".join(thoughts) if thoughts else None
