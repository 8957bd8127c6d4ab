"""How the output of a request is split: decided once, stored with the request, and used by every
gateway that renders it. Pure."""

import hashlib
import json

from gateway_svc.output_formats.calls import Tools
from gateway_svc.output_formats.formats import (
    HARMONY,
    JSON,
    REASONING_FORMATS,
    TOOL_FORMATS,
    ModelFormats,
)
from gateway_svc.output_formats.parser import OutputParser, ParserOptions
from gateway_svc.text import chat_messages
from gateway_svc.text.detokenizer import Vocabulary
from quire.internal.v1 import gateway_pb2
from quire.service.errors import invalid
from quire.v1 import conversation_pb2

# Begins the message after the reasoning.
_HARMONY_FINAL = "<|channel|>final<|message|>"
_ID_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def check_formats(conversation: conversation_pb2.Conversation, formats: ModelFormats) -> None:
    """RequestError at the tools if their calls could not be read, and at the continuation of a
    message if its output could not."""
    if conversation.continue_final_message and HARMONY in (formats.tools, formats.reasoning):
        raise invalid(
            "conversation.continue_final_message",
            "UNSUPPORTED_FIELD",
            f"is not served for models of the format {HARMONY}, whose output begins with the kind "
            "of its message",
        )
    is_auto = chat_messages.offers_tools(conversation) and not is_forced(conversation)
    if is_auto and formats.tools is None:
        raise invalid(
            "conversation.tools",
            "UNKNOWN_TOOL_FORMAT",
            "may be called, but the format of the model's calls is not known; set "
            "--tool-call-parser of the gateway, or require a call by tool_choice",
        )


def is_forced(conversation: conversation_pb2.Conversation) -> bool:
    """Whether the output is a call in any case."""
    choice = conversation.tool_choice
    is_required = choice.mode == conversation_pb2.TOOL_CHOICE_MODE_REQUIRED
    return bool(conversation.tools) and (is_required or choice.WhichOneof("choice") == "name")


def is_guided(conversation: conversation_pb2.Conversation) -> bool:
    """Whether a grammar holds calls to the schemas of their tools."""
    if not chat_messages.offers_tools(conversation):
        return False
    return is_forced(conversation) or any(tool.strict for tool in conversation.tools)


def choose(
    conversation: conversation_pb2.Conversation,
    formats: ModelFormats,
    rendered: str,
    has_format: bool = False,
) -> gateway_pb2.OutputParsing | None:
    """How the output that follows a rendered prompt is split; None if it is all content.
    `has_format`: content follows a format, in which it may begin like a call."""
    offers_tools = chat_messages.offers_tools(conversation)
    tool_format = (formats.tools or JSON) if offers_tools else None
    reasoning_format = formats.reasoning
    is_open = False
    if reasoning_format in REASONING_FORMATS:
        markers = REASONING_FORMATS[reasoning_format]
        end = rendered.rstrip()
        is_open = end.endswith(markers.start)
        if conversation.continue_final_message:
            # The last message may have been cut within its reasoning, or behind it.
            content = conversation.messages[-1].content
            is_open = content.rfind(markers.start) > content.rfind(markers.end)
        if end.endswith(markers.end) or (conversation.continue_final_message and not is_open):
            reasoning_format = None
    if tool_format is None and reasoning_format is None:
        return None
    needs_schemas = tool_format is not None and TOOL_FORMATS[tool_format].needs_schemas
    tools = conversation.tools if offers_tools else ()
    return gateway_pb2.OutputParsing(
        tool_format=tool_format or "",
        reasoning_format=reasoning_format or "",
        reasoning_is_open=is_open,
        guided=is_guided(conversation) and (not has_format or is_forced(conversation)),
        forced=is_forced(conversation),
        single_call=not conversation.parallel_tool_calls
        and conversation.HasField("parallel_tool_calls"),
        calls_or_content=has_format,
        omit_reasoning=not conversation.include_reasoning
        and conversation.HasField("include_reasoning"),
        tool_names=[tool.name for tool in tools],
        tool_schemas=[tool.parameters or "{}" for tool in tools] if needs_schemas else (),
        held_tool_names=[
            tool.name
            for tool in tools
            if needs_schemas and (tool.strict or is_forced(conversation))
        ],
    )


def parser(parsing: gateway_pb2.OutputParsing) -> OutputParser:
    schemas = [json.loads(schema) for schema in parsing.tool_schemas]
    schemas += [None] * (len(parsing.tool_names) - len(schemas))
    return OutputParser(
        ParserOptions(
            parsing.tool_format or None,
            parsing.reasoning_format or None,
            parsing.reasoning_is_open,
            Tools(
                dict(zip(parsing.tool_names, schemas, strict=True)),
                are_guided=parsing.guided,
                are_forced=parsing.forced,
                is_single=parsing.single_call,
                begin_output=parsing.calls_or_content,
                held_names=frozenset(parsing.held_tool_names),
            ),
        )
    )


def marker_ids(parsing: gateway_pb2.OutputParsing, vocabulary: Vocabulary) -> frozenset[int]:
    """The tokens that are markers: the parser reads them even where special tokens are left out."""
    formats = ModelFormats(parsing.tool_format or None, parsing.reasoning_format or None)
    found = (vocabulary.tokenizer.token_to_id(marker) for marker in formats.markers)
    return frozenset(id_ for id_ in found if id_ is not None)


def reasoning_end(parsing: gateway_pb2.OutputParsing) -> str | None:
    """The text that ends the reasoning; None if the output begins without any."""
    if parsing.reasoning_format == HARMONY:
        return _HARMONY_FINAL
    markers = REASONING_FORMATS.get(parsing.reasoning_format)
    return None if markers is None else markers.end


class CallIds:
    """Ids of the calls of one choice, which are the same on every gateway."""

    def __init__(self, request_id: str, choice: int, tool_format: str) -> None:
        self._prefix = f"{request_id}\n{choice}\n"
        form = TOOL_FORMATS.get(tool_format)
        self._length = None if form is None else form.id_length

    def __getitem__(self, index: int) -> str:
        digest = hashlib.sha256(f"{self._prefix}{index}".encode()).digest()
        if self._length is None:
            return f"call_{digest.hex()[:24]}"
        return "".join(_ID_LETTERS[byte % len(_ID_LETTERS)] for byte in digest[: self._length])
