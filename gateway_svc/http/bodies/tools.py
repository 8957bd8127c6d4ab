"""Tools and calls of them, in the bodies of chat completions."""

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from gateway_svc.http.bodies.fields import Hint, HttpRequest, JsonObject
from quire.v1 import conversation_pb2

MAX_TOOLS = 128
MAX_CALLS = 128


class FunctionTool(HttpRequest):
    """A function that the model may call."""

    name: str
    description: str | None = None
    # The JSON Schema of its arguments.
    parameters: JsonObject | None = None
    strict: bool | None = None
    cache_control: Hint | None = None

    def to_proto(self) -> conversation_pb2.Tool:
        return conversation_pb2.Tool(
            name=self.name,
            description=self.description,
            parameters=schema_text(self.parameters),
            strict=self.strict,
        )


class ChatTool(HttpRequest):
    type: Literal["function"]
    function: FunctionTool
    cache_control: Hint | None = None


class FunctionName(HttpRequest):
    name: str


class NamedTool(HttpRequest):
    # huggingface_hub leaves it out.
    type: Literal["function"] = "function"
    function: FunctionName


ChatTools = Annotated[list[ChatTool], Field(max_length=MAX_TOOLS)]
ToolMode = Literal["none", "auto", "required"]
# As OpenAI has them. Others are variables of a template: `chat_template_kwargs`.
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class FunctionCall(HttpRequest):
    name: str
    # A JSON object, as the output has it.
    arguments: str | None = None
    # Of OpenAI's client for Python: the arguments once more, as an object.
    parsed_arguments: Any = None


class ChatToolCall(HttpRequest):
    """A call in an assistant's message that a client sends back."""

    id: str
    type: Literal["function"] | None = None
    function: FunctionCall
    # Of deltas that a client has put together.
    index: int | None = None
    cache_control: Hint | None = None

    def to_proto(self) -> conversation_pb2.ToolCall:
        return conversation_pb2.ToolCall(
            id=self.id, name=self.function.name, arguments=self.function.arguments or "{}"
        )


ChatToolCalls = Annotated[list[ChatToolCall], Field(max_length=MAX_CALLS)]


def schema_text(schema: dict[str, Any] | None) -> str | None:
    """A schema as the gRPC API has it. Keys keep their order: arguments are written in it."""
    return None if schema is None else json.dumps(schema, ensure_ascii=False)


def tool_choice(mode: ToolMode | None, name: str | None) -> conversation_pb2.ToolChoice | None:
    """At most one of the two is set."""
    if name is not None:
        return conversation_pb2.ToolChoice(name=name)
    return None if mode is None else conversation_pb2.ToolChoice(mode=_MODES[mode])


_MODES: dict[ToolMode, conversation_pb2.ToolChoiceMode.ValueType] = {
    "none": conversation_pb2.TOOL_CHOICE_MODE_NONE,
    "auto": conversation_pb2.TOOL_CHOICE_MODE_AUTO,
    "required": conversation_pb2.TOOL_CHOICE_MODE_REQUIRED,
}


def with_reasoning_effort(
    variables: dict[str, Any] | None, effort: ReasoningEffort | None
) -> dict[str, Any] | None:
    """The variables of a chat template, with those that control its reasoning unless they are
    set: `reasoning_effort`, and `enable_thinking` or `thinking` for none."""
    if effort is None:
        return variables
    implied: dict[str, Any] = {"reasoning_effort": effort}
    if effort == "none":
        implied = {"enable_thinking": False, "thinking": False}
    return {**implied, **(variables or {})}
