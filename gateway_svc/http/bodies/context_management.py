"""The edits of a conversation that a client of `/v1/messages` asks for."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from gateway_svc.http.bodies.fields import Count, HttpRequest
from quire.v1 import conversation_pb2


class KeptThinking(HttpRequest):
    """How many of the last replies of the assistant keep their thinking."""

    type: Literal["thinking_turns"]
    value: Count


class ClearThinking(HttpRequest):
    """Which replies keep their thinking: all, or the last ones."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] | KeptThinking


class ContextManagement(HttpRequest):
    edits: Annotated[list[ClearThinking], Field(max_length=1)] | None = None

    def apply(self, messages: Sequence[conversation_pb2.Message]) -> None:
        """Change messages in place."""
        for edit in self.edits or ():
            if isinstance(edit.keep, KeptThinking):
                _clear_thinking(messages, edit.keep.value)


def _clear_thinking(messages: Sequence[conversation_pb2.Message], num_kept: int) -> None:
    """Remove the reasoning of all but the last replies that have any. A reply is what follows a
    message of the user, with its calls and their results."""
    num_replies = 0
    is_counted = False
    for message in reversed(messages):
        if message.role == "user":
            is_counted = False
        elif message.reasoning:
            num_replies += not is_counted
            is_counted = True
            if num_replies > num_kept:
                message.ClearField("reasoning")
