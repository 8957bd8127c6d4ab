"""Chat templates, rendered as the transformers library does."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

TemplateError = jinja2.TemplateError

# Variables of a template that requests cannot set.
RESERVED_VARIABLES = frozenset({"messages", "add_generation_prompt", "tools", "documents"})
# A text that no template contains.
_PROBE = "\N{START OF HEADING}probe\N{START OF HEADING}"


class ChatTemplate:
    """A compiled template and the special tokens it may use. TemplateError if it is invalid."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._template = _environment().from_string(source)
        self._special_tokens = dict(special_tokens)
        self._has_system = self._renders_system()
        # A template that renders any role does not mean that the model knows this one.
        self._has_developer = "developer" in source

    def render(
        self,
        messages: Sequence[Mapping[str, str]],
        add_generation_prompt: bool,
        variables: Mapping[str, object] = MappingProxyType({}),
    ) -> str:
        """Render messages. TemplateError if the template refuses them or fails.

        Messages of a developer are system messages for a template that does not name their role.
        System messages precede the first user message's text for a template that has none.
        """
        if not self._has_developer:
            messages = [
                {**message, "role": "system"} if message["role"] == "developer" else message
                for message in messages
            ]
        if not self._has_system:
            messages = _without_system(messages)
        return self._render(messages, add_generation_prompt, variables)

    def _renders_system(self) -> bool:
        """Whether the text of a first system message is part of the prompt."""
        messages = [{"role": "system", "content": _PROBE}, {"role": "user", "content": "-"}]
        try:
            return _PROBE in self._render(messages, True, {})
        except TemplateError:
            return False

    def _render(
        self,
        messages: Sequence[Mapping[str, str]],
        add_generation_prompt: bool,
        variables: Mapping[str, object],
    ) -> str:
        try:
            return self._template.render(
                {
                    **self._special_tokens,
                    **variables,
                    "messages": messages,
                    "add_generation_prompt": add_generation_prompt,
                    "tools": None,
                    "documents": None,
                }
            )
        # Expressions in templates can raise any of these.
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise TemplateError(str(error)) from error


def _without_system(messages: Sequence[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """Prepend the text of all system messages to the first user message."""
    system = [message["content"] for message in messages if message["role"] == "system"]
    others: list[Mapping[str, str]] = [m for m in messages if m["role"] != "system"]
    if not system:
        return others
    at = next((at for at, message in enumerate(others) if message["role"] == "user"), None)
    if at is None:
        return [{"role": "user", "content": "\n\n".join(system)}, *others]
    text = "\n\n".join([*system, others[at]["content"]])
    others[at] = {**others[at], "content": text}
    return others


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; its body is rendered."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    # Plain JSON: jinja's own filter escapes HTML.
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
