"""Conversations as messages: their content, tools and calls, in the form of OpenAI's API.

Functions raise TypeError or ValueError for what a message cannot contain.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from typing_extensions import TypedDict

from quire.client.arguments import check_flag, check_json, check_text, to_struct, wrong_type
from quire.v1 import conversation_pb2

# {"role": "user", "content": "Hello"}; an assistant's message may have "tool_calls" and
# "reasoning", one of the role "tool" has the "tool_call_id".
Message: TypeAlias = Mapping[str, Any]
Conversation: TypeAlias = Sequence[Message]
# {"type": "function", "function": {"name": "f", "parameters": {...}}}
Tool: TypeAlias = Mapping[str, Any]
ToolChoice: TypeAlias = Literal["auto", "none", "required"] | Mapping[str, Any]

_TEXTS = ("role", "content", "tool_call_id", "reasoning", "name")
MESSAGE_KEYS = (*_TEXTS, "tool_calls")
_MODES = {
    "auto": conversation_pb2.TOOL_CHOICE_MODE_AUTO,
    "none": conversation_pb2.TOOL_CHOICE_MODE_NONE,
    "required": conversation_pb2.TOOL_CHOICE_MODE_REQUIRED,
}
_A_MESSAGE = "{'role': text, 'content': text}"
_A_TOOL = "{'type': 'function', 'function': {'name': text, ...}}"


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool by the model."""

    id: str
    name: str
    # A JSON object.
    arguments: str

    @classmethod
    def from_proto(cls, call: conversation_pb2.ToolCall) -> "ToolCall":
        return cls(call.id, call.name, call.arguments)


class ConversationOptions(TypedDict, total=False):
    """Options of a request whose prompt is a conversation."""

    tools: Sequence[Tool] | None
    # "auto", "none", "required", or {"type": "function", "function": {"name": text}}.
    tool_choice: ToolChoice | None
    # False: at most one call.
    parallel_tool_calls: bool | None
    # False leaves the reasoning out of the output.
    include_reasoning: bool | None
    # Ends the prompt with the start of the assistant's message; the default is True.
    add_generation_prompt: bool | None
    # The output continues the content of the last message; the default is False.
    continue_final_message: bool | None
    # Variables for the chat template.
    chat_template_kwargs: Mapping[str, Any] | None
    # For a template that renders documents, such as {"title": text, "text": text}.
    documents: Sequence[Mapping[str, str]] | None


def conversation_proto(conversation: Conversation) -> conversation_pb2.Conversation:
    return conversation_pb2.Conversation(messages=[_message(m) for m in conversation])


def fill_options(conversation: conversation_pb2.Conversation, options: ConversationOptions) -> None:
    """Set what is given."""
    for name in (
        "parallel_tool_calls",
        "include_reasoning",
        "add_generation_prompt",
        "continue_final_message",
    ):
        value = options.get(name)
        check_flag(name, value)
        if value is not None:
            setattr(conversation, name, value)
    tools = options.get("tools")
    if tools is not None:
        if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
            raise wrong_type("tools", "a list of tools", tools)
        conversation.tools.extend(_tool(f"tools[{at}]", tool) for at, tool in enumerate(tools))
    choice = options.get("tool_choice")
    if choice is not None:
        conversation.tool_choice.CopyFrom(_tool_choice(choice))
    documents = options.get("documents")
    if documents is not None:
        if isinstance(documents, str | Mapping) or not isinstance(documents, Sequence):
            raise wrong_type("documents", "a list of documents", documents)
        conversation.documents.extend(
            _document(f"documents[{at}]", document) for at, document in enumerate(documents)
        )
    variables = to_struct("chat_template_kwargs", options.get("chat_template_kwargs"))
    if variables is not None:
        conversation.chat_template_kwargs.CopyFrom(variables)


def _document(name: str, document: object) -> conversation_pb2.Document:
    if not isinstance(document, Mapping):
        raise wrong_type(name, "a document, texts by name", document)
    for key, text in document.items():
        check_text(f"{name}: a name", key)
        check_text(f"{name}: {key}", text)
    return conversation_pb2.Document(
        fields=[
            conversation_pb2.DocumentField(name=key, text=text) for key, text in document.items()
        ]
    )


def _message(message: Message) -> conversation_pb2.Message:
    given = {key: value for key, value in message.items() if value is not None}
    has_text = all(isinstance(given[key], str) for key in _TEXTS if key in given)
    if "role" not in given or not set(given) <= set(MESSAGE_KEYS) or not has_text:
        raise ValueError(f"messages: expected {_A_MESSAGE}, got {message!r:.100}")
    calls = given.pop("tool_calls", [])
    if "content" not in given and not calls:
        raise ValueError(f"messages: expected {_A_MESSAGE}, got {message!r:.100}")
    for key, value in given.items():
        check_text(f"messages: {key}", value)
    if isinstance(calls, str | Mapping) or not isinstance(calls, Sequence):
        raise wrong_type("messages: tool_calls", "a list of calls", calls)
    return conversation_pb2.Message(**given, tool_calls=[_call(call) for call in calls])


def _call(call: object) -> conversation_pb2.ToolCall:
    if isinstance(call, ToolCall):
        found: Mapping[str, Any] = vars(call)
    else:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(call, Mapping) or not isinstance(function, Mapping):
            raise wrong_type("messages: tool_calls", "a list of calls", call)
        found = {
            "id": call.get("id"),
            "name": function.get("name"),
            "arguments": function.get("arguments"),
        }
    for key, value in found.items():
        if value is None:
            raise wrong_type(f"messages: tool_calls: {key}", "a text", value)
        check_text(f"messages: tool_calls: {key}", value)
    return conversation_pb2.ToolCall(**found)


def _tool(name: str, tool: object) -> conversation_pb2.Tool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise wrong_type(name, _A_TOOL, tool)
    for key in set(function) - {"name", "description", "parameters", "strict"}:
        raise ValueError(f"{name}: a function has no {key!r}")
    check_text(f"{name}: name", function["name"])
    check_text(f"{name}: description", function.get("description"))
    check_flag(f"{name}: strict", function.get("strict"))
    parameters = function.get("parameters")
    check_json(f"{name}: parameters", parameters)
    return conversation_pb2.Tool(
        name=function["name"],
        description=function.get("description"),
        # Keys keep their order: arguments are written in it.
        parameters=None if parameters is None else json.dumps(dict(parameters)),
        strict=function.get("strict"),
    )


def _tool_choice(choice: object) -> conversation_pb2.ToolChoice:
    if isinstance(choice, str) and choice in _MODES:
        return conversation_pb2.ToolChoice(mode=_MODES[choice])
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise wrong_type(
            "tool_choice",
            "'auto', 'none', 'required' or {'type': 'function', 'function': {'name': text}}",
            choice,
        )
    check_text("tool_choice", name)
    return conversation_pb2.ToolChoice(name=name)
