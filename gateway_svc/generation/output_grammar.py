"""The grammar that an output follows: that of its format, or that of calls of its tools."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gateway_svc.generation import output_parsing
from gateway_svc.generation.validation import GenerationRequest
from gateway_svc.output_formats.formats import HARMONY, JSON
from gateway_svc.output_formats.guided import GuidedTool, Node, UnguidedError, structural_tag
from gateway_svc.structured.compiler import CompiledFormat, StructuredOutputCompiler
from gateway_svc.structured.json_schemas import num_schema_quantifiers
from gateway_svc.structured.lark import choice_to_lark
from gateway_svc.structured.lark_source import INITIAL_SKIP_IN_PART
from gateway_svc.structured.patterns import MAX_QUANTIFIERS
from gateway_svc.text import chat_messages
from gateway_svc.text.served_model import Model
from quire.internal.v1 import gateway_pb2, logits_pb2
from quire.service.errors import RequestError, invalid
from quire.v1 import conversation_pb2
from quire.v1.structured_output_pb2 import StructuredOutput

_FORMAT = "sampling_params.structured_output"
_TOOLS = "conversation.tools"


@dataclass(frozen=True)
class OutputGrammar:
    """A grammar, the field that it is made of, and whose it is."""

    compiled: CompiledFormat
    field: str
    principal: str
    # The output is free up to these; empty: guided from the start.
    begins_after_token_ids: Sequence[int] = ()

    def to_proto(self) -> logits_pb2.Grammar:
        return logits_pb2.Grammar(
            definition=self.compiled.definition,
            begins_after_token_ids=self.begins_after_token_ids,
            field=self.field,
            principal=self.principal,
        )


async def build(
    request: GenerationRequest,
    model: Model,
    parsing: gateway_pb2.OutputParsing | None,
    principal: str,
) -> OutputGrammar | None:
    """None if the output is free. RequestError names the field that is refused. The `principal`
    gets its share of the threads."""
    params, conversation, field = request.sampling_params, request.conversation, _TOOLS
    # The output of a forced call has no content, which a format is that of.
    has_format = params.HasField("structured_output") and not output_parsing.is_forced(conversation)
    if has_format:
        # With tools as well, so that a refusal names its field.
        compiled = await model.structured.compile(_FORMAT, params.structured_output, principal)
    if has_format and not chat_messages.offers_tools(conversation):
        field = f"{_FORMAT}.{params.structured_output.WhichOneof('format')}"
    elif parsing is not None and (has_format or output_parsing.is_guided(conversation)):
        if params.ignore_eos:
            raise invalid(
                "sampling_params.ignore_eos",
                "IGNORE_EOS_WITH_FORMAT",
                "is set, but calls of tools that follow their schemas end the output; leave it out",
            )
        if has_format and compiled.has_initial_skip:
            raise invalid(f"{_FORMAT}.grammar", "FORMAT_WITH_TOOLS", INITIAL_SKIP_IN_PART)
        content = _content(params.structured_output) if has_format else None
        compiled = await _of_tools(conversation, model, parsing, principal, content)
        if parsing.tool_format == HARMONY:
            # It has the reasoning, too.
            return OutputGrammar(compiled, field, principal)
    else:
        return None
    end = None if parsing is None else output_parsing.reasoning_end(parsing)
    begins_after: Sequence[int] = () if end is None else await model.encode(end, False)
    return OutputGrammar(compiled, field, principal, begins_after)


async def _of_tools(
    conversation: conversation_pb2.Conversation,
    model: Model,
    parsing: gateway_pb2.OutputParsing,
    principal: str,
    content: Node | None,
) -> CompiledFormat:
    """The grammar of calls, and of `content`, which the model may write instead."""
    is_named = conversation.tool_choice.WhichOneof("choice") == "name"
    is_forced = output_parsing.is_forced(conversation)
    tools = _guided_tools(conversation, is_forced)
    try:
        tag = structural_tag(
            parsing.tool_format or JSON,
            model.files.template_source,
            [*tools.values()],
            is_forced,
            is_single=is_named or parsing.single_call,
            follows_reasoning=bool(parsing.reasoning_format),
            content=content,
        )
        output = StructuredOutput(structural_tag=tag)
        return await model.structured.compile(_TOOLS, output, principal)
    except UnguidedError as error:
        raise invalid(_TOOLS, "UNGUIDED_TOOL", f"cannot be guided: {error}") from error
    except RequestError as error:
        await _refuse_schema(tools, model.structured, principal)
        _check_quantifiers(tools)
        raise invalid(_TOOLS, "UNGUIDED_TOOL", _reason(error)) from error


def _content(output: StructuredOutput) -> Node:
    """A format that was compiled, as one of a structural tag."""
    match name := output.WhichOneof("format"):
        case "json_schema":
            return {"type": "json_schema", "json_schema": json.loads(output.json_schema)}
        case "json_object":
            return {"type": "json_schema", "json_schema": {"type": "object"}}
        case "regex":
            return {"type": "regex", "pattern": output.regex}
        case "grammar":
            return {"type": "grammar", "grammar": output.grammar}
        case "choice":
            # Not a list of constants, which are 2,000 at most and may be special tokens.
            return {"type": "grammar", "grammar": choice_to_lark([*output.choice.texts]).text}
    raise invalid(
        f"{_FORMAT}.{name}",
        "FORMAT_WITH_TOOLS",
        "is set together with tools that the model may call; set tool_choice to none, or describe "
        "the calls in the tag",
    )


def _guided_tools(
    conversation: conversation_pb2.Conversation, is_forced: bool
) -> dict[str, GuidedTool]:
    """The tools that may be called, by the fields of their schemas, which only objects follow."""
    choice = conversation.tool_choice
    tools: dict[str, GuidedTool] = {}
    for at, tool in enumerate(conversation.tools):
        field = f"{_TOOLS}[{at}].parameters"
        schema = chat_messages.schema(tool) if is_forced or tool.strict else {}
        types = schema.get("type", "object")
        if "object" not in (types if isinstance(types, list) else [types]):
            raise invalid(
                field,
                "UNSUPPORTED_SCHEMA",
                "the keyword type at # must be object, as arguments are",
            )
        if choice.WhichOneof("choice") != "name" or tool.name == choice.name:
            guided = {**schema, "type": "object"} if schema else schema
            tools[field] = GuidedTool(tool.name, guided)
    return tools


def _check_quantifiers(tools: Mapping[str, GuidedTool]) -> None:
    """RequestError at the schema with most quantifiers if all together have too many."""
    found = {field: num_schema_quantifiers(tool.schema) for field, tool in tools.items()}
    total = sum(found.values())
    if total > MAX_QUANTIFIERS:
        largest = max(found, key=lambda field: found[field])
        raise invalid(
            largest,
            "UNSUPPORTED_SCHEMA",
            f"has {found[largest]} of the {total} quantifiers in patterns of all tools; at most "
            f"{MAX_QUANTIFIERS} are allowed",
        )


async def _refuse_schema(
    tools: Mapping[str, GuidedTool], compiler: StructuredOutputCompiler, principal: str
) -> None:
    """RequestError at the first schema that is refused on its own."""
    for field, tool in tools.items():
        text = json.dumps(tool.schema, ensure_ascii=False)
        try:
            await compiler.compile(field, StructuredOutput(json_schema=text), principal)
        except RequestError as error:
            raise invalid(field, "UNSUPPORTED_SCHEMA", _reason(error)) from error


def _reason(error: RequestError) -> str:
    """An error's message without its field."""
    return error.message.partition(": ")[2] or error.message
