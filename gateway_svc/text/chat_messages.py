"""Messages, tools and documents of a conversation, in the form that transformers passes."""

import json
from typing import Any

from quire.v1 import conversation_pb2


def messages(conversation: conversation_pb2.Conversation) -> list[dict[str, Any]]:
    """The messages. Arguments of calls are JSON objects in the conversation, and values here. The
    result of a call has the name of its tool."""
    names: dict[str, str] = {}
    result: list[dict[str, Any]] = []
    for message in conversation.messages:
        names.update((call.id, call.name) for call in message.tool_calls)
        result.append(_message(message))
        if message.tool_call_id in names:
            result[-1].setdefault("name", names[message.tool_call_id])
    return result


def _message(message: conversation_pb2.Message) -> dict[str, Any]:
    result: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.HasField("reasoning"):
        # Templates have different names for it.
        result["reasoning_content"] = result["reasoning"] = message.reasoning
        result["thinking"] = message.reasoning
    if message.tool_calls:
        result["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.loads(call.arguments or "{}")},
            }
            for call in message.tool_calls
        ]
    if message.HasField("tool_call_id"):
        result["tool_call_id"] = message.tool_call_id
    if message.HasField("name"):
        result["name"] = message.name
    return result


def tools(conversation: conversation_pb2.Conversation) -> list[dict[str, Any]] | None:
    """The tools; None if there are none, or none may be called."""
    if not conversation.tools or not offers_tools(conversation):
        return None
    return [{"type": "function", "function": _function(tool)} for tool in conversation.tools]


def documents(conversation: conversation_pb2.Conversation) -> list[dict[str, str]] | None:
    """The documents; None if there are none."""
    found = conversation.documents
    return [{one.name: one.text for one in document.fields} for document in found] or None


def offers_tools(conversation: conversation_pb2.Conversation) -> bool:
    """Whether the model may call the conversation's tools."""
    choice = conversation.tool_choice
    return bool(conversation.tools) and choice.mode != conversation_pb2.TOOL_CHOICE_MODE_NONE


def _function(tool: conversation_pb2.Tool) -> dict[str, Any]:
    """With a description, as most templates expect one."""
    return {
        "name": tool.name,
        "description": tool.description,
        "parameters": schema(tool),
    }


def schema(tool: conversation_pb2.Tool) -> dict[str, Any]:
    """The JSON Schema of a tool's arguments."""
    found = json.loads(tool.parameters) if tool.parameters else {}
    return found or {"type": "object", "properties": {}}
