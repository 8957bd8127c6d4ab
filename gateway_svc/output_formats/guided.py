"""Calls of tools as a structural tag, in vLLM's form: the format that guides an output.

A grammar of it admits what the parser of the same format reads, with arguments that follow the
schemas of their tools. Pure.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway_svc.output_formats import deepseek, harmony, json_text
from gateway_svc.output_formats.argument_schemas import closed, moved
from gateway_svc.output_formats.formats import HARMONY, JSON

# A format of a structural tag: its type, and fields of that type.
Node = dict[str, Any]

_ANY_OBJECT = {"type": "object"}
_ANY_TEXT: Node = {"type": "any_text"}
_NOTHING: Node = {"type": "const_string", "value": ""}


class UnguidedError(ValueError):
    """A tool whose calls cannot be guided in a format; the message has the reason."""


@dataclass(frozen=True)
class GuidedTool:
    """A tool that may be called, and the JSON Schema of its arguments; any if it is empty."""

    name: str
    schema: Mapping[str, Any]


@dataclass(frozen=True)
class _Form:
    """How a format writes calls."""

    # In front of the arguments, with `{name}` for the tool's.
    begin: str
    end: str
    separator: str = ""
    # Around all calls.
    opening: str = ""
    closing: str = ""
    # In free output, what begins with it is a call. Empty: calls can only begin the output.
    trigger: str = ""
    # In free output, calls may begin with this, without what `begin` has in front of it.
    bare: str = ""
    # Arguments are written one by one: what is in front of a key, between it and the value, and
    # behind the value. Otherwise they are JSON.
    argument: tuple[str, str, str] | None = None


def structural_tag(
    tool_format: str,
    template: str,
    tools: Sequence[GuidedTool],
    is_forced: bool,
    is_single: bool,
    follows_reasoning: bool = False,
    content: Node | None = None,
) -> str:
    """The format of an output with calls of these tools, as JSON: only calls if they are forced,
    either calls or `content` if it is given, else text in which each call follows its schema.
    UnguidedError if a tool cannot be guided."""
    form = _form(tool_format, template)
    # Content may begin as a call does that has no marker.
    is_bare = content is not None and not form.trigger and tool_format != HARMONY
    tags = [_json_call(tool) if is_bare else _tag(form, tool) for tool in tools]
    if tool_format == HARMONY:
        node = _harmony(tags, is_forced, content or _ANY_TEXT)
    elif is_forced:
        node = _calls(form, tags, is_single)
    elif content is not None:
        node = {"type": "or", "elements": [_calls(form, tags, is_single), content]}
    else:
        node = _free(form, tags, is_single)
    if follows_reasoning and tool_format != HARMONY:
        node = _sequence({"type": "regex", "pattern": "\\n{0,2}"}, node)
    return json.dumps({"type": "structural_tag", "format": node}, ensure_ascii=False)


def _form(tool_format: str, template: str) -> _Form:
    """The form that a chat template has, where a format has several."""
    match tool_format:
        case "mistral" if "[ARGS]" in template:
            return _Form("[TOOL_CALLS]{name}[ARGS]", "", trigger="[TOOL_CALLS]")
        case "deepseek" if "```json" in template:
            begin = f"{deepseek.CALL_BEGIN}function{deepseek.SEPARATOR}{{name}}\n```json\n"
            return _Form(
                begin,
                f"\n```{deepseek.CALL_END}",
                "\n",
                deepseek.CALLS_BEGIN,
                deepseek.CALLS_END,
                deepseek.CALLS_BEGIN,
            )
    return _FORMS[tool_format]


_FORMS = {
    "hermes": _Form(
        '<tool_call>\n{{"name": "{name}", "arguments": ',
        "}\n</tool_call>",
        "\n",
        trigger="<tool_call>",
    ),
    "llama3": _Form('{{"name": "{name}", "parameters": ', "}", "; "),
    "mistral": _Form(
        '{{"name": "{name}", "arguments": ', "}", ", ", "[TOOL_CALLS][", "]", "[TOOL_CALLS]"
    ),
    "deepseek": _Form(
        f"{deepseek.CALL_BEGIN}{{name}}{deepseek.SEPARATOR}",
        deepseek.CALL_END,
        "",
        deepseek.CALLS_BEGIN,
        deepseek.CALLS_END,
        deepseek.CALLS_BEGIN,
    ),
    "glm": _Form(
        "<tool_call>{name}\n",
        "</tool_call>",
        "\n",
        trigger="<tool_call>",
        argument=("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
    ),
    "qwen3_coder": _Form(
        "<tool_call>\n<function={name}>\n",
        "</function>\n</tool_call>",
        "\n",
        trigger="<tool_call>",
        bare="<function=",
        argument=("<parameter=", ">\n", "\n</parameter>\n"),
    ),
    HARMONY: _Form(
        f"{harmony.CHANNEL}commentary to=functions.{{name}} {harmony.CONSTRAIN}json"
        f"{harmony.MESSAGE}",
        "",
    ),
    JSON: _Form('{{"name": "{name}", "parameters": ', "}", ", ", "[", "]"),
}


def _tag(form: _Form, tool: GuidedTool) -> Node:
    if form.argument is None:
        schema = closed(tool.schema) or _ANY_OBJECT
        content: Node = {"type": "json_schema", "json_schema": schema}
    else:
        content = _arguments(form.argument, tool)
    return {
        "type": "tag",
        "begin": form.begin.format(name=tool.name),
        "content": content,
        "end": form.end,
    }


def _json_call(tool: GuidedTool) -> Node:
    """A call that is JSON as a whole, so that it and other JSON are read alike up to where they
    differ."""
    parameters = moved(closed(tool.schema) or _ANY_OBJECT, "#/properties/parameters")
    properties = {"name": {"const": tool.name}, "parameters": parameters}
    schema = {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }
    if "$schema" in tool.schema:
        # The version is read at the top alone.
        schema["$schema"] = tool.schema["$schema"]
    content = {"type": "json_schema", "json_schema": schema}
    return {"type": "tag", "begin": "", "content": content, "end": ""}


def _calls(form: _Form, tags: list[Node], is_single: bool) -> Node:
    calls: Node = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": form.separator,
        "at_least_one": True,
        "stop_after_first": is_single,
    }
    around = [_text(form.opening)] if form.opening else []
    return _sequence(*around, calls, *([_text(form.closing)] if form.closing else []))


def _free(form: _Form, tags: list[Node], is_single: bool) -> Node:
    if not form.trigger:
        # Text that does not begin like a call, in front of which the parser skips white space.
        first = form.opening or form.begin.format(name="")[:1]
        pattern = f"[ \\t\\r\\n]*([^ \\t\\r\\n\\{first}](.|\\n)*)?"
        other = {"type": "regex", "pattern": pattern}
        return {"type": "or", "elements": [_calls(form, tags, is_single), other]}
    if form.bare:
        return _free_or_bare(form, tags, is_single)
    if not form.opening:
        return {
            "type": "triggered_tags",
            "triggers": [form.trigger],
            "tags": tags,
            "stop_after_first": is_single,
        }
    calls = _calls(form, tags, is_single)
    block = {"type": "tag", "begin": form.opening, "content": calls["elements"][1], "end": ""}
    block["end"] = form.closing
    return {"type": "triggered_tags", "triggers": [form.trigger], "tags": [block]}


def _free_or_bare(form: _Form, tags: list[Node], is_single: bool) -> Node:
    """Text in which calls may lack what is around them: one part for both kinds, which has the
    schemas."""
    before = form.begin.partition(form.bare)[0]
    ends = [form.end, _marker(form.end)]
    starts = [
        _any_text("", before + form.bare),
        {"type": "tag", "begin": "", "content": _ANY_TEXT, "end": form.bare},
    ]
    calls = [
        {**tag, "begin": tag["begin"].removeprefix(before + form.bare), "end": ends} for tag in tags
    ]
    elements = [{"type": "or", "elements": one} for one in (starts, calls)]
    one = {"type": "tag", "begin": "", "content": _sequence(*elements), "end": ""}
    several = {"tags": [one], "separator": "", "stop_after_first": is_single}
    return _sequence({"type": "tags_with_separator", **several}, _ANY_TEXT)


def _harmony(tags: list[Node], is_forced: bool, content: Node) -> Node:
    """Messages: reasoning and a preamble if the model writes them, then a call or the response.
    Markers are special tokens, which are no text."""
    begin, end = f"{harmony.CHANNEL}{{}}{harmony.MESSAGE}", f"{harmony.END}{harmony.START}assistant"
    before = [
        _optional({"type": "tag", "begin": begin.format(channel), "content": _ANY_TEXT, "end": end})
        for channel in ("analysis", "commentary")
    ]
    ends = [*tags]
    if not is_forced:
        ends.append(_sequence(_text(begin.format("final")), content))
    return _sequence(*before, {"type": "or", "elements": ends})


def _arguments(around: tuple[str, str, str], tool: GuidedTool) -> Node:
    """Arguments that are written one by one, in the order of the schema. Any if there is none."""
    if not tool.schema:
        before, between, behind = around
        one = _sequence(_any_text(before, between), _any_text("", behind))
        tag = {"type": "tag", "begin": "", "content": one, "end": ""}
        return {"type": "tags_with_separator", "tags": [tag], "separator": ""}
    properties = tool.schema.get("properties", {})
    if not isinstance(properties, dict) or {"$ref", "oneOf", "anyOf", "allOf"} & set(tool.schema):
        raise UnguidedError(
            f"the schema of {tool.name} has keywords other than properties at its top, which "
            "this model's format of calls does not support"
        )
    required = tool.schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise UnguidedError(f"`required` in the schema of {tool.name} is no list of texts")
    elements = []
    unnamed = {name: True for name in required if name not in properties}
    for key, schema in {**properties, **unnamed}.items():
        node = _argument(around, key, schema, tool.schema)
        elements.append(node if key in required else _optional(node))
    return _sequence(*elements) if elements else _NOTHING


def _argument(around: tuple[str, str, str], key: str, schema: Any, root: Mapping[str, Any]) -> Node:
    begin, end = f"{around[0]}{key}{around[1]}", around[2]
    texts = json_text.plain_values(schema)
    plain = [(key, _marker(around[1])), *((text, _marker(end)) for text in texts or ())]
    for shown, marker in plain:
        if marker in shown:
            raise UnguidedError(f"{shown!r:.80} has {marker}, which ends it in this model's format")
    if texts:
        content: Node = {"type": "or", "elements": [_text(text) for text in texts]}
    elif texts is not None:
        return _any_text(begin, end)
    else:
        definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
        schema = {**schema, **definitions} if isinstance(schema, dict) else schema
        content = {"type": "json_schema", "json_schema": schema}
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _any_text(begin: str, end: str) -> Node:
    """Any text, which ends where it does for the parser: at the first marker of `end`. A line feed
    in front of the marker is the text's."""
    marker = _marker(end)
    text = {"type": "tag", "begin": begin, "content": _ANY_TEXT, "end": marker}
    return _sequence(text, _text(end.partition(marker)[2]))


def _marker(end: str) -> str:
    """The first marker of what follows a text."""
    found, mark, _ = end.lstrip("\n").partition(">")
    return found + mark


def _text(value: str) -> Node:
    return {"type": "const_string", "value": value}


def _sequence(*elements: Node) -> Node:
    return {"type": "sequence", "elements": list(elements)}


def _optional(node: Node) -> Node:
    return {"type": "or", "elements": [node, _NOTHING]}
