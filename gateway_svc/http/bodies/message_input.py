"""Anthropic's messages and their blocks, and the messages of a conversation that they become."""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import AfterValidator, Field

from gateway_svc.http.bodies.chat import MAX_MESSAGES
from gateway_svc.http.bodies.fields import Hint, HttpRequest, at_most_deep, unsupported
from gateway_svc.http.bodies.joining import join_adjacent
from gateway_svc.http.bodies.thinking import RedactedThinkingBlock, ThinkingBlock, reasoning_of
from gateway_svc.http.bodies.tools import MAX_CALLS
from gateway_svc.output_formats.calls import TOOL_NAME
from quire.service.errors import invalid
from quire.v1 import conversation_pb2

_MAX_ID = 256
_BILLING = "x-anthropic-billing-header:"
Identifier = Annotated[str, Field(max_length=_MAX_ID)]
# As `conversation_checks` has them, where the index of a message is no longer the client's.
_ToolName = Annotated[str, Field(pattern=f"^{TOOL_NAME.pattern}$")]
_Input = Annotated[dict[str, Any], AfterValidator(at_most_deep(64))]


class TextBlock(HttpRequest):
    type: Literal["text"]
    text: str
    # Where a prefix to cache ends. It changes nothing: every prefix is cached.
    cache_control: Hint | None = None
    citations: unsupported([]) = None  # type: ignore[valid-type]


Texts = str | Annotated[list[TextBlock], Field(max_length=MAX_MESSAGES)]


class ToolUseBlock(HttpRequest):
    """A call in an assistant's message that a client sends back."""

    type: Literal["tool_use"]
    id: Identifier
    name: _ToolName
    input: _Input
    cache_control: Hint | None = None
    # Of calls that the model makes itself, as all are.
    caller: unsupported({"type": "direct"}) = None  # type: ignore[valid-type]
    toolset_name: unsupported() = None  # type: ignore[valid-type]

    def to_proto(self) -> conversation_pb2.ToolCall:
        arguments = orjson.dumps(self.input).decode()
        return conversation_pb2.ToolCall(id=self.id, name=self.name, arguments=arguments)


class ToolResultBlock(HttpRequest):
    """What the client's function has returned."""

    type: Literal["tool_result"]
    tool_use_id: Identifier
    content: Texts | None = None
    # The content says what went wrong: templates have no place for this.
    is_error: bool | None = None
    cache_control: Hint | None = None
    toolset_name: unsupported() = None  # type: ignore[valid-type]


Block = TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock


class InputMessage(HttpRequest):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(max_length=MAX_MESSAGES)]

    @property
    def blocks(self) -> Sequence[Block]:
        if isinstance(self.content, str):
            return [TextBlock(type="text", text=self.content)]
        return self.content


def text_of(texts: Texts | None) -> str:
    """The text of blocks, which line feeds separate."""
    if texts is None or isinstance(texts, str):
        return texts or ""
    return "\n".join(block.text for block in texts)


def _system(system: Texts | None) -> list[conversation_pb2.Message]:
    """A system prompt without what a client states for its bill: it differs between conversations,
    whose prefixes would not be found in the cache. Empty if nothing else is there."""
    if isinstance(system, list):
        system = [block for block in system if not block.text.startswith(_BILLING)]
    if system is None or system == []:
        return []
    return [conversation_pb2.Message(role="system", content=text_of(system))]


def messages_of(
    messages: Sequence[InputMessage], system: Texts | None
) -> list[conversation_pb2.Message]:
    """The system prompt and the messages. Results of calls become messages of the role `tool`,
    calls and reasoning parts of the assistant's message. Adjacent messages of one role become one,
    as in Anthropic's API: many templates refuse them. RequestError for a block that the role does
    not have."""
    result = _system(system)
    num_calls = 0
    for at, message in enumerate(messages):
        _check_blocks(f"messages[{at}]", message)
        converted = list(_converted(message))
        result += converted
        # Other roles have no calls.
        num_calls = num_calls + len(converted[-1].tool_calls) if message.role == "assistant" else 0
        if num_calls > MAX_CALLS:
            raise invalid(
                f"messages[{at}].content",
                "TOO_MANY_CALLS",
                f"has more than {MAX_CALLS} blocks of tool_use, with those of the messages before",
            )
    return join_adjacent(result, _is_continued)


def _check_blocks(field: str, message: InputMessage) -> None:
    allowed = _BLOCKS[message.role]
    for at, block in enumerate(message.blocks):
        if not isinstance(block, allowed):
            raise invalid(
                f"{field}.content[{at}].type",
                "BLOCK_OF_ROLE",
                f"is {block.type}, which is not for the role {message.role}",
            )


def _converted(message: InputMessage) -> Iterable[conversation_pb2.Message]:
    """The messages in the order of their blocks; one without blocks has no text."""
    if message.role == "assistant":
        yield _assistant(message.blocks)
        return
    texts: list[str] = []
    blocks = message.blocks
    for block in blocks:
        match block:
            case TextBlock():
                texts.append(block.text)
            case ToolResultBlock():
                if texts:
                    yield conversation_pb2.Message(role=message.role, content="\n".join(texts))
                    texts = []
                yield conversation_pb2.Message(
                    role="tool", content=text_of(block.content), tool_call_id=block.tool_use_id
                )
    if texts or not blocks:
        yield conversation_pb2.Message(role=message.role, content="\n".join(texts))


def _assistant(blocks: Sequence[Block]) -> conversation_pb2.Message:
    return conversation_pb2.Message(
        role="assistant",
        content="\n".join(block.text for block in blocks if isinstance(block, TextBlock)),
        tool_calls=[block.to_proto() for block in blocks if isinstance(block, ToolUseBlock)],
        reasoning=reasoning_of(blocks),
    )


def _is_continued(one: conversation_pb2.Message, other: conversation_pb2.Message) -> bool:
    return one.role == other.role and one.role != "tool"


_BLOCKS: dict[str, tuple[type[HttpRequest], ...]] = {
    "user": (TextBlock, ToolResultBlock),
    "assistant": (TextBlock, ToolUseBlock, ThinkingBlock, RedactedThinkingBlock),
    "system": (TextBlock,),
}
