"""The formats by name, and which one a model writes."""

from collections.abc import Callable
from dataclasses import dataclass

from gateway_svc.output_formats import deepseek, harmony, json_calls, xml_calls
from gateway_svc.output_formats.calls import CallWriter
from gateway_svc.output_formats.reader import Reader, Step
from gateway_svc.output_formats.reasoning import Markers

HARMONY = "harmony"
# Of guided calls of models whose format is not known.
JSON = "json"
_AUTO, _NONE = "auto", "none"


@dataclass(frozen=True)
class ToolFormat:
    """A format of calls."""

    parse: Callable[[Reader, CallWriter], Step[None]]
    # Texts by which a chat template is recognised: all of one of these.
    signs: tuple[tuple[str, ...], ...]
    # Markers, which may be special tokens.
    markers: tuple[str, ...]
    # Arguments are written as plain text, whose types are those of the schemas.
    needs_schemas: bool = False
    # Characters of an id of a call; None for the usual form.
    id_length: int | None = None


def _harmony(reader: Reader, calls: CallWriter) -> Step[None]:
    return harmony.harmony(reader, calls, lambda text: None, lambda is_reasoning: None)


# In the order in which a chat template is compared with them.
TOOL_FORMATS = {
    HARMONY: ToolFormat(_harmony, (("<|channel|>",),), harmony.MARKERS),
    "deepseek": ToolFormat(
        deepseek.deepseek, ((deepseek.CALL_BEGIN,), (deepseek.CALLS_BEGIN,)), deepseek.MARKERS
    ),
    "mistral": ToolFormat(
        json_calls.mistral,
        (("[TOOL_CALLS]",),),
        ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        id_length=9,
    ),
    "glm": ToolFormat(
        xml_calls.glm,
        (("<tool_call>", "<arg_key>"),),
        (
            "<tool_call>",
            "</tool_call>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
        ),
        needs_schemas=True,
    ),
    "qwen3_coder": ToolFormat(
        xml_calls.qwen_coder,
        (("<function=", "<parameter="),),
        ("<tool_call>", "</tool_call>"),
        needs_schemas=True,
    ),
    "hermes": ToolFormat(json_calls.hermes, (("<tool_call>",),), ("<tool_call>", "</tool_call>")),
    "llama3": ToolFormat(
        json_calls.llama,
        (("<|python_tag|>",), ('{"name": function name, "parameters"',)),
        ("<|python_tag|>",),
    ),
    JSON: ToolFormat(json_calls.json_list, (), ()),
}
REASONING_FORMATS = {
    "think": Markers("<think>", "</think>"),
    "mistral": Markers("[THINK]", "[/THINK]"),
    "seed": Markers("<seed:think>", "</seed:think>"),
}
TOOL_SETTINGS = (_AUTO, _NONE, *TOOL_FORMATS)
REASONING_SETTINGS = (_AUTO, _NONE, HARMONY, *REASONING_FORMATS)


@dataclass(frozen=True)
class ModelFormats:
    """The formats that a model writes; None where it has none, or none that is known."""

    tools: str | None = None
    reasoning: str | None = None

    @property
    def markers(self) -> frozenset[str]:
        """The texts that have to reach a parser, even as special tokens."""
        found: set[str] = set()
        if self.tools is not None:
            found |= set(TOOL_FORMATS[self.tools].markers)
        if self.reasoning == HARMONY:
            found |= set(harmony.MARKERS)
        elif self.reasoning is not None:
            markers = REASONING_FORMATS[self.reasoning]
            found |= {markers.start, markers.end}
        return frozenset(found)


def choose(template: str, tools: str = _AUTO, reasoning: str = _AUTO) -> ModelFormats:
    """The formats of a model by its chat template, unless settings name others."""
    return ModelFormats(
        _tool_format(template) if tools == _AUTO else _named(tools),
        _reasoning_format(template) if reasoning == _AUTO else _named(reasoning),
    )


def _named(setting: str) -> str | None:
    return None if setting == _NONE else setting


def _tool_format(template: str) -> str | None:
    for name, form in TOOL_FORMATS.items():
        if any(all(sign in template for sign in signs) for signs in form.signs):
            return name
    return None


def _reasoning_format(template: str) -> str | None:
    if _tool_format(template) == HARMONY:
        return HARMONY
    found = (name for name, markers in REASONING_FORMATS.items() if markers.end in template)
    return next(found, None)
