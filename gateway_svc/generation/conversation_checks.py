"""Checks of a conversation's messages, tools and documents. Pure.

Errors name it `conversation`, which is its field in every request.
"""

from gateway_svc.generation.field_checks import check_at_most
from gateway_svc.output_formats.calls import TOOL_NAME
from gateway_svc.structured.errors import FormatError
from gateway_svc.structured.json_values import read_json
from quire.service.errors import invalid
from quire.v1 import conversation_pb2

MAX_MESSAGES = 4096
MAX_ROLE_CHARACTERS = 64
MAX_TOOLS = 128
MAX_CALLS = 128
# Of the arguments of all calls together, which are parsed.
MAX_ARGUMENT_CHARACTERS = 2**21
# Of all tools together.
MAX_SCHEMA_BYTES = 2**17
MAX_ID_CHARACTERS = 256
MAX_DOCUMENTS = 1024
MAX_DOCUMENT_FIELDS = 64
# Of values within JSON: Python's parser would fail far beyond.
_MAX_DEPTH = 64
_A_NAME = "1 to 128 letters, digits, `_`, `-` and `.` are allowed"


def check_messages(conversation: conversation_pb2.Conversation) -> None:
    if not conversation.messages:
        raise invalid("conversation", "EMPTY_CONVERSATION", "has no messages; at least 1 is needed")
    # Before any work per message: millions of empty messages fit into a request.
    check_at_most(
        "conversation.messages", "TOO_MANY_MESSAGES", len(conversation.messages), MAX_MESSAGES
    )
    calls = (call for message in conversation.messages for call in message.tool_calls)
    num_characters = sum(len(call.arguments) for call in calls)
    unit = "characters in the arguments of calls"
    field = "conversation.messages"
    check_at_most(field, "CALLS_SIZE", num_characters, MAX_ARGUMENT_CHARACTERS, unit)
    for at, message in enumerate(conversation.messages):
        _check_message(f"{field}[{at}]", message)
    if conversation.continue_final_message:
        _check_continued(conversation)


def _check_message(field: str, message: conversation_pb2.Message) -> None:
    role = f"{field}.role"
    check_at_most(role, "ROLE_LENGTH", len(message.role), MAX_ROLE_CHARACTERS, "characters")
    if message.tool_calls and message.role != "assistant":
        raise invalid(
            f"{field}.tool_calls",
            "CALLS_OF_ROLE",
            f"are in a message of the role {message.role!r:.80}; only the role assistant has calls",
        )
    check_at_most(f"{field}.tool_calls", "TOO_MANY_CALLS", len(message.tool_calls), MAX_CALLS)
    for at, call in enumerate(message.tool_calls):
        one = f"{field}.tool_calls[{at}]"
        _check_name(f"{one}.name", call.name)
        check_at_most(f"{one}.id", "ID_LENGTH", len(call.id), MAX_ID_CHARACTERS, "characters")
        _check_object(f"{one}.arguments", call.arguments or "{}")
    if message.HasField("tool_call_id"):
        at_most = (len(message.tool_call_id), MAX_ID_CHARACTERS, "characters")
        check_at_most(f"{field}.tool_call_id", "ID_LENGTH", *at_most)
    if message.HasField("name"):
        check_at_most(f"{field}.name", "NAME_LENGTH", len(message.name), 64, "characters")


def _check_continued(conversation: conversation_pb2.Conversation) -> None:
    field, last = "conversation.continue_final_message", conversation.messages[-1]
    if conversation.add_generation_prompt:
        raise invalid(
            field, "TWO_ENDS", "is set together with add_generation_prompt; set one of them"
        )
    if not last.content.strip() or last.tool_calls:
        found = "calls of tools" if last.tool_calls else "no text"
        raise invalid(field, "NOTHING_TO_CONTINUE", f"is set, but the last message has {found}")


def check_tools(conversation: conversation_pb2.Conversation) -> None:
    names: set[str] = set()
    num_bytes = 0
    check_at_most("conversation.tools", "TOO_MANY_TOOLS", len(conversation.tools), MAX_TOOLS)
    for at, tool in enumerate(conversation.tools):
        one = f"conversation.tools[{at}]"
        _check_name(f"{one}.name", tool.name)
        if tool.name in names:
            raise invalid(f"{one}.name", "DUPLICATE_TOOL", f"is {tool.name!r} for a second time")
        names.add(tool.name)
        num_bytes += len(tool.parameters.encode())
        check_at_most(
            f"{one}.parameters", "TOOLS_SIZE", num_bytes, MAX_SCHEMA_BYTES, "bytes up to here"
        )
        if tool.HasField("parameters"):
            _check_object(f"{one}.parameters", tool.parameters)
    _check_tool_choice(conversation.tool_choice, names)


def check_documents(conversation: conversation_pb2.Conversation) -> None:
    found = conversation.documents
    check_at_most("conversation.documents", "TOO_MANY_DOCUMENTS", len(found), MAX_DOCUMENTS)
    for at, document in enumerate(found):
        field = f"conversation.documents[{at}].fields"
        if not document.fields:
            raise invalid(field, "EMPTY_DOCUMENT", "is empty; a document has fields")
        check_at_most(field, "TOO_MANY_FIELDS", len(document.fields), MAX_DOCUMENT_FIELDS)
        names = [one.name for one in document.fields]
        if (twice := next((name for name in names if names.count(name) > 1), None)) is not None:
            raise invalid(field, "DUPLICATE_FIELD", f"has {twice!r:.80} for a second time")


def _check_tool_choice(choice: conversation_pb2.ToolChoice, names: set[str]) -> None:
    field = "conversation.tool_choice"
    match choice.WhichOneof("choice"):
        case "name" if choice.name not in names:
            raise invalid(f"{field}.name", "UNKNOWN_TOOL", f"is {choice.name!r:.80}, not a tool")
        case "mode":
            if choice.mode not in conversation_pb2.ToolChoiceMode.values():
                raise invalid(field, "TOOL_CHOICE_MODE", f"is {choice.mode}, not a mode")
            if choice.mode == conversation_pb2.TOOL_CHOICE_MODE_REQUIRED and not names:
                raise invalid(field, "NO_TOOLS", "requires a call, and there are no tools")


def _check_name(field: str, name: str) -> None:
    if not TOOL_NAME.fullmatch(name):
        raise invalid(field, "TOOL_NAME", f"is {name!r:.80}; {_A_NAME}")


def _check_object(field: str, text: str) -> None:
    try:
        value = read_json(text)
    except FormatError as error:
        raise invalid(field, "NOT_JSON", f"{error!s:.200}") from None
    if not isinstance(value, dict):
        raise invalid(field, "NO_OBJECT", "is not a JSON object")
    level: list[object] = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            inner
            for one in level
            if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
    if level:
        raise invalid(field, "TOO_DEEP", f"is nested in more than {_MAX_DEPTH} levels")
