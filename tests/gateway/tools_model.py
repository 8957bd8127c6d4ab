"""A model of the gateway that calls tools: a chat template, and output in its format."""

from typing import Any

import pytest
from gateway_stack import Stack

from gateway_svc.output_formats.formats import choose
from gateway_svc.scheduler.shards import Shards
from gateway_svc.text.chat_template import ChatTemplate

TEMPLATE = """
{%- for tool in tools or [] %}<|tool|>{{ tool | tojson }}{% endfor %}
{%- for message in messages %}
{%- if message.role not in ["system", "user", "assistant", "tool"] %}
{{- raise_exception("no role " ~ message.role) }}
{%- endif %}
<|{{ message.role }}|>
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{%- set function = call.function %}
<tool_call>{{ {"name": function.name, "arguments": function.arguments} | tojson }}</tool_call>
{%- endfor %}
{%- if message.tool_call_id %}={{ message.tool_call_id }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}
{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}
{%- if reasoning_effort is defined %}{{ reasoning_effort }}{% endif %}
"""
FUNCTION = {
    "name": "weather",
    "description": "The weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": FUNCTION},
    {"type": "function", "function": {"name": "now"}},
]
ARGUMENTS = '{"city": "Bern"}'
CALLS = (
    f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
OUTPUT = f"<think>\nWhy?\n</think>\n\nSo: {CALLS}"


def use(stack: Stack, monkeypatch: pytest.MonkeyPatch, source: str = TEMPLATE) -> None:
    """Give the stack's model this template, and room for prompts with tools."""
    model = stack.gateway.served.get(None)
    monkeypatch.setitem(model.files.__dict__, "chat_template", ChatTemplate(source, {}))
    monkeypatch.setitem(model.__dict__, "formats", choose(source))
    monkeypatch.setattr(Shards, "max_model_len", 4096)
