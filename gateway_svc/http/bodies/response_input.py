"""Items of the input of a response, and the messages that they become."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from gateway_svc.http.bodies.chat import MAX_MESSAGES, TextPart, text_of
from gateway_svc.http.bodies.fields import HttpRequest, JsonObject, unsupported
from gateway_svc.http.bodies.joining import join_adjacent
from gateway_svc.http.bodies.tools import FunctionTool, ReasoningEffort
from quire.v1 import conversation_pb2

_SYSTEM = ("system", "developer")


class InputText(TextPart):
    """A text of the input, or of an earlier response's output."""

    # Of output that a client sends back, the second one of OpenAI's clients. They change nothing.
    logprobs: list[Any] | None = None
    parsed: Any = None


InputContent = str | Annotated[list[InputText], Field(max_length=MAX_MESSAGES)]


class InputMessage(HttpRequest):
    """A message of the input, or of an earlier response's output."""

    role: Annotated[str, Field(min_length=1)]
    content: InputContent
    type: Literal["message"] | None = None
    id: str | None = None
    status: str | None = None
    phase: unsupported() = None  # type: ignore[valid-type]


class InputCall(HttpRequest):
    """A call of an earlier response."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    # Of OpenAI's client for Python: the arguments once more, as an object.
    parsed_arguments: Any = None
    id: str | None = None
    status: str | None = None
    namespace: unsupported() = None  # type: ignore[valid-type]


class InputCallOutput(HttpRequest):
    """What the client's function has returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: InputContent
    id: str | None = None
    status: str | None = None


class ReasoningText(HttpRequest):
    type: Literal["reasoning_text"]
    text: str


class SummaryText(HttpRequest):
    type: Literal["summary_text"]
    text: str


class InputReasoning(HttpRequest):
    """Reasoning of an earlier response."""

    type: Literal["reasoning"]
    id: str | None = None
    # What other servers have of their reasoning; it stands for `content` where there is none.
    summary: Annotated[list[SummaryText], Field(max_length=MAX_MESSAGES)] | None = None
    content: Annotated[list[ReasoningText], Field(max_length=MAX_MESSAGES)] | None = None
    encrypted_content: unsupported() = None  # type: ignore[valid-type]
    status: str | None = None

    @property
    def text(self) -> str:
        return "\n".join(part.text for part in self.content or self.summary or ())


def _check_is_whole(value: object) -> object:
    """The value of an item, unless it refers to an item of an earlier response."""
    if isinstance(value, dict) and value.get("type") == "item_reference":
        raise PydanticCustomError(
            "unsupported", "is an item_reference, which is not supported; send the item itself"
        )
    return value


InputItem = Annotated[
    InputMessage | InputCall | InputCallOutput | InputReasoning, BeforeValidator(_check_is_whole)
]


class ResponseTool(HttpRequest):
    """A function that the model may call."""

    # Before the others, so that an error names it first.
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None

    def to_proto(self) -> conversation_pb2.Tool:
        return FunctionTool(**self.model_dump(exclude={"type"})).to_proto()


class NamedResponseTool(HttpRequest):
    type: Literal["function"]
    name: str


class ReasoningConfig(HttpRequest):
    # Sets variables of the chat template.
    effort: ReasoningEffort | None = None
    # Reasoning is returned whole, without a summary.
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    generate_summary: unsupported() = None  # type: ignore[valid-type]


def messages_of(items: Sequence[InputItem]) -> list[conversation_pb2.Message]:
    """Reasoning and calls become parts of the assistant's message that they belong to. Adjacent
    items of reasoning are joined as the parts of one are."""
    messages: list[conversation_pb2.Message] = []
    # None before any reasoning, which may have no text.
    thoughts: list[str] | None = None
    for item in items:
        if isinstance(item, InputReasoning):
            thoughts = thoughts or []
            thoughts.append(item.text)
            continue
        reasoning = None if thoughts is None else "\n".join(filter(None, thoughts))
        thoughts = None
        match item:
            case InputMessage():
                is_assistant = item.role == "assistant"
                fields: dict[str, Any] = {"reasoning": reasoning} if is_assistant else {}
                text = text_of(item.content)
                messages.append(conversation_pb2.Message(role=item.role, content=text, **fields))
            case InputCall():
                if not messages or messages[-1].role != "assistant" or reasoning is not None:
                    messages.append(conversation_pb2.Message(role="assistant", reasoning=reasoning))
                arguments = item.arguments or "{}"
                messages[-1].tool_calls.add(id=item.call_id, name=item.name, arguments=arguments)
            case InputCallOutput():
                text = text_of(item.output)
                messages.append(
                    conversation_pb2.Message(role="tool", content=text, tool_call_id=item.call_id)
                )
    return messages


def joined(messages: Sequence[conversation_pb2.Message]) -> list[conversation_pb2.Message]:
    """Join adjacent messages of users, and at the beginning all of the system and of developers,
    whose roles most templates do not distinguish."""
    others = (at for at, message in enumerate(messages) if message.role not in _SYSTEM)
    num_first = next(others, len(messages))
    return [
        *join_adjacent(messages[:num_first], lambda one, other: True),
        *join_adjacent(messages[num_first:], lambda one, other: one.role == other.role == "user"),
    ]
