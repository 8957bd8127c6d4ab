"""Outputs as models of each family write them, and what they consist of."""

import json
from dataclasses import dataclass, field
from typing import Any

from gateway_svc.output_formats.calls import Tools
from gateway_svc.output_formats.deepseek import (
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    SEPARATOR,
)
from gateway_svc.output_formats.parser import ParserOptions

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "zip": {"type": ["string", "null"]},
        "other": {},
    },
}
SCHEMAS: dict[str, Any] = {"weather": SCHEMA, "now": None}
ARGUMENTS = '{"city": "Zürich \\"HB\\" {", "days": 2}'


@dataclass(frozen=True)
class Recorded:
    """A text, and its reasoning, its content and its calls by name and arguments."""

    tool_format: str | None
    text: str
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    reasoning: str = ""
    reasoning_format: str | None = None
    is_open: bool = False
    has_tools: bool = True

    def options(self, are_guided: bool = False, is_single: bool = False) -> ParserOptions:
        schemas = SCHEMAS if self.has_tools else {}
        return ParserOptions(
            self.tool_format,
            self.reasoning_format,
            self.is_open,
            Tools(schemas, are_guided, is_single=is_single),
        )


def _call(name: str, arguments: str, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


WEATHER, NOW = ("weather", ARGUMENTS), ("now", "{}")
_V3 = f"{CALL_BEGIN}function{SEPARATOR}weather\n```json\n{ARGUMENTS}\n```{CALL_END}"
_V3_NOW = f"{CALL_BEGIN}function{SEPARATOR}now\n```json\n{{}}\n```{CALL_END}"
_GLM = (
    "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Zürich <HB></arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n"
    '<arg_key>tags</arg_key>\n<arg_value>["a", "b"]</arg_value>\n'
    "<arg_key>zip</arg_key>\n<arg_value>null</arg_value>\n"
    "<arg_key>other</arg_key>\n<arg_value>True</arg_value>\n</tool_call>"
)
_QWEN = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nZürich\n  HB\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
)
_ANALYSIS = "<|channel|>analysis<|message|>The user asks.<|end|><|start|>assistant"
_HARMONY = f" to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
TYPED = json.dumps(
    {"city": "Zürich <HB>", "days": 2, "tags": ["a", "b"], "zip": None, "other": True},
    ensure_ascii=False,
)

RECORDED = {
    "hermes": Recorded(
        "hermes",
        f"Let me see.\n<tool_call>\n{_call(*WEATHER)}\n</tool_call>\n"
        f"<tool_call>\n{_call(*NOW)}\n</tool_call>",
        "Let me see.\n",
        [WEATHER, NOW],
    ),
    "hermes in another order": Recorded(
        "hermes",
        '\n\n<tool_call>{"arguments": {"a": [1]}, "name": "now"}',
        calls=[("now", '{"a": [1]}')],
    ),
    "hermes without arguments": Recorded(
        "hermes", '<tool_call>{"name": "now"}</tool_call> Done.', " Done.", [NOW]
    ),
    "hermes, broken": Recorded(
        "hermes",
        f'<tool_call>{{"name": "f", "arguments": {{"a": }}}}</tool_call>{_call(*NOW)}'
        f"<tool_call>{_call(*NOW)}</tool_call>",
        f'<tool_call>{{"name": "f", "arguments": {{"a": }}}}</tool_call>{_call(*NOW)}',
        [NOW],
    ),
    "hermes, cut": Recorded(
        "hermes", '<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu'
    ),
    "hermes, no call": Recorded("hermes", " a < b <tool", " a < b <tool"),
    "hermes, only space": Recorded("hermes", " \n", " \n"),
    "qwen3": Recorded(
        "hermes",
        f"<think>\nIs it\nwarm?\n</think>\n\n<tool_call>\n{_call(*WEATHER)}\n</tool_call>",
        "",
        [WEATHER],
        "Is it\nwarm?",
        "think",
    ),
    "reasoning of the prompt": Recorded(
        None, "\nWhy?\n\nSo.\n</think>\n\nYes.\n", "Yes.\n", [], "Why?\n\nSo.", "think", True
    ),
    "reasoning, cut": Recorded(None, "<think>Why?\n\n", "", [], "Why?\n\n", "think"),
    "no reasoning": Recorded(None, " <thin air> ", " <thin air> ", [], "", "think"),
    "magistral": Recorded(
        "mistral",
        f"[THINK]Why?[/THINK]So.[TOOL_CALLS]weather[ARGS]{ARGUMENTS}",
        "So.",
        [WEATHER],
        "Why?",
        "mistral",
    ),
    "mistral": Recorded(
        "mistral", f"[TOOL_CALLS] [{_call(*WEATHER)}, {_call(*NOW)}]", "", [WEATHER, NOW]
    ),
    "mistral by name": Recorded(
        "mistral",
        f"[TOOL_CALLS]weather[CALL_ID]a1b2c3d4e[ARGS]{ARGUMENTS}[TOOL_CALLS]now[ARGS]{{}}",
        "",
        [WEATHER, NOW],
    ),
    "mistral, broken": Recorded(
        "mistral", f"[TOOL_CALLS][{_call(*NOW)}, 5] [TOOL_CALLS]?", ", 5] [TOOL_CALLS]?", [NOW]
    ),
    "llama": Recorded(
        "llama3",
        f"{_call('weather', ARGUMENTS, 'parameters')}; {_call('now', '{}', 'parameters')}",
        "",
        [WEATHER, NOW],
    ),
    "llama with a tag": Recorded(
        "llama3",
        f'<|python_tag|>{{"type": "function", "name": "weather", "parameters": {ARGUMENTS}}}',
        "",
        [WEATHER],
    ),
    "llama, another object": Recorded(
        "llama3",
        ' {"name": "Ada", "parameters": {}} <|python_tag|>print(1)',
        ' {"name": "Ada", "parameters": {}} <|python_tag|>print(1)',
    ),
    "deepseek v3": Recorded(
        "deepseek",
        f"Let me see.{CALLS_BEGIN}{_V3}\n{_V3_NOW}{CALLS_END}",
        "Let me see.",
        [WEATHER, NOW],
    ),
    "deepseek r1": Recorded(
        "deepseek",
        f"Why?\n</think>\n\n{CALLS_BEGIN}{_V3}{CALLS_END}",
        "",
        [WEATHER],
        "Why?",
        "think",
        True,
    ),
    "deepseek v3.1": Recorded(
        "deepseek",
        f"{CALLS_BEGIN}{CALL_BEGIN}weather{SEPARATOR}{ARGUMENTS}{CALL_END}{CALLS_END}",
        "",
        [WEATHER],
    ),
    "deepseek, broken": Recorded(
        "deepseek",
        f"{CALLS_BEGIN}{CALL_BEGIN}weather{CALL_END} {CALL_BEGIN}now{SEPARATOR}[1]",
        f"{CALLS_BEGIN}{CALL_BEGIN}weather{CALL_END} {CALL_BEGIN}now{SEPARATOR}[1]",
    ),
    "glm": Recorded(
        "glm",
        f"\n<think>Why?</think>\nSo.\n{_GLM}\n<tool_call>now\n</tool_call>",
        "So.\n",
        [("weather", TYPED), NOW],
        "Why?",
        "think",
    ),
    "glm, broken": Recorded(
        "glm",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bern",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bern",
    ),
    "qwen3_coder": Recorded(
        "qwen3_coder",
        f"So.\n{_QWEN}\n<function=now>\n</function>",
        "So.\n",
        [("weather", '{"city": "Zürich\\n  HB", "days": 2}'), NOW],
    ),
    "qwen3_coder, broken": Recorded(
        "qwen3_coder", "<tool_call>\n<function=now> ?", "<tool_call>\n<function=now> ?"
    ),
    "harmony": Recorded(
        "harmony",
        f"{_ANALYSIS}<|channel|>final<|message|>It is <warm>.",
        "It is <warm>.",
        [],
        "The user asks.",
        "harmony",
    ),
    "harmony with a call": Recorded(
        "harmony",
        f"{_ANALYSIS}<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant"
        f"<|channel|>commentary{_HARMONY}",
        "Let me see.",
        [WEATHER],
        "The user asks.",
        "harmony",
    ),
    "harmony, recipient of the role": Recorded(
        "harmony",
        f" to=functions.weather<|channel|>commentary json<|message|>{ARGUMENTS}",
        "",
        [WEATHER],
    ),
    "harmony, broken": Recorded(
        "harmony",
        "<|channel|>commentary to=functions.now<|message|>{1<|call|>",
        "<|channel|>commentary to=functions.now<|message|>{1",
    ),
    "harmony without tools": Recorded(
        "harmony",
        "<|channel|>commentary to=functions.now<|message|>{}<|call|>",
        "{}",
        has_tools=False,
    ),
    "harmony without a header": Recorded("harmony", "Yes: <1>.", "Yes: <1>."),
    "json": Recorded(
        "json",
        f"[{_call('weather', ARGUMENTS, 'parameters')}, {_call('now', '{}', 'parameters')}]",
        "",
        [WEATHER, NOW],
    ),
    "json, text": Recorded("json", " [1]", " [1]"),
    "nothing to parse": Recorded(None, "<think> <tool_call>", "<think> <tool_call>"),
}
