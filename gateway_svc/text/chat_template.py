"""Chat templates, rendered as the transformers library does."""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

TemplateError = jinja2.TemplateError

# A message as templates get it: its role and content, and fields that it may have.
Message = Mapping[str, Any]

# Variables of a template that requests cannot set.
RESERVED_VARIABLES = frozenset({"messages", "add_generation_prompt", "tools", "documents"})
# A macro may call itself without an end, and a text be repeated too often.
_FAILURES = (
    *(TypeError, ValueError, ArithmeticError, LookupError, AttributeError),
    *(RecursionError, MemoryError),
)
# A comparison of a content with none, such as `message['content'] is not none`.
_NONE_CONTENT = re.compile(r"""\bcontent['")\]]*\s*(==|!=|\bis\b(\s+not)?)\s*[Nn]one\b""")
# A text that no template contains, and that JSON, HTML and the like leave as it is.
_PROBE = "quireprobe7f3c2e"
_PROBE_TOOL: Mapping[str, object] = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    },
}
# Marks the end of a message that is continued. Its space shows whether the template keeps those at
# the end of a content.
_CONTINUED = "quirecontinued7f3c2e "


class ChatTemplate:
    """A compiled template and the special tokens it may use. TemplateError if it is invalid."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._template = _environment().from_string(source)
        self._special_tokens = dict(special_tokens)
        user: Message = {"role": "user", "content": _PROBE}
        # Templates of models that also read images may render the parts of a content only.
        self._reads_parts = not self._shows_probe([user]) and self._shows_probe(_in_parts([user]))
        system_first = [{"role": "system", "content": _PROBE}, {"role": "user", "content": "-"}]
        self._has_system = self._shows_probe(
            _in_parts(system_first) if self._reads_parts else system_first
        )
        # A template that renders any role does not mean that the model knows this one.
        self._has_developer = "developer" in source
        # Templates that compare a content with none expect it of calls without text.
        self._compares_none = _NONE_CONTENT.search(source) is not None
        self.has_documents = "documents" in source

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        variables: Mapping[str, object] = MappingProxyType({}),
        tools: Sequence[Mapping[str, object]] | None = None,
        documents: Sequence[Mapping[str, str]] | None = None,
    ) -> str:
        """Render messages, tools and documents, in the form in which transformers passes them.
        TemplateError if the template refuses them or fails.

        A template gets the arguments of earlier calls as objects, or as JSON if it fails on those.
        Messages of a developer are system messages for a template that does not name their role.
        System messages precede the first user message's text for a template that has none.
        Contents are lists of one part for a template that renders only those.
        """
        if not self._has_developer:
            messages = [
                {**message, "role": "system"} if message["role"] == "developer" else message
                for message in messages
            ]
        if not self._has_system:
            messages = _without_system(messages)
        if self._compares_none:
            messages = [
                {**one, "content": None} if one.get("tool_calls") and not one["content"] else one
                for one in messages
            ]
        if self._reads_parts:
            messages = _in_parts(messages)
        try:
            return self._render(messages, add_generation_prompt, variables, tools, documents)
        except TemplateError:
            if not any(message.get("tool_calls") for message in messages):
                raise
            as_json = [_with_json_arguments(message) for message in messages]
            try:
                return self._render(as_json, add_generation_prompt, variables, tools, documents)
            except TemplateError:
                pass
            raise

    def render_continued(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, object] = MappingProxyType({}),
        tools: Sequence[Mapping[str, object]] | None = None,
        documents: Sequence[Mapping[str, str]] | None = None,
    ) -> str:
        """Render messages up to the end of the last one's content, as transformers does with
        `continue_final_message`. TemplateError also if the template changes this content."""
        *others, last = messages
        marked = {**last, "content": last["content"] + _CONTINUED}
        rendered = self.render([*others, marked], False, variables, tools, documents)
        before, mark, after = rendered.rpartition(_CONTINUED.strip())
        if not mark or not before.rstrip().endswith(last["content"].strip()):
            raise TemplateError(
                "it leaves out or changes a part of the last message, which cannot be continued"
            )
        return before if after.startswith(" ") else before.rstrip()

    def _shows_probe(self, messages: Sequence[Message]) -> bool:
        """Whether the text of a message with the probe is part of the prompt: with a tool, if the
        template fails without any."""
        for tools in (None, [_PROBE_TOOL]):
            try:
                # Some templates change the case.
                return _PROBE in self._render(messages, True, {}, tools).lower()
            except TemplateError:
                continue
        return False

    def _render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        variables: Mapping[str, object],
        tools: Sequence[Mapping[str, object]] | None = None,
        documents: Sequence[Mapping[str, str]] | None = None,
    ) -> str:
        try:
            text = self._template.render(
                {
                    **self._special_tokens,
                    **variables,
                    "messages": messages,
                    "add_generation_prompt": add_generation_prompt,
                    "tools": tools,
                    "documents": documents,
                }
            )
            # Fails with half of a surrogate pair, which no tokenizer reads.
            text.encode()
            return text
        # Expressions in templates can raise any of these.
        except _FAILURES as error:
            raise TemplateError(str(error) or type(error).__name__) from error


def _in_parts(messages: Sequence[Message]) -> list[Message]:
    """The same messages with texts as parts of OpenAI's API."""
    return [
        {**one, "content": [{"type": "text", "text": one["content"]}]} if one["content"] else one
        for one in messages
    ]


def _with_json_arguments(message: Message) -> Message:
    """The same message with the arguments of its calls as JSON."""
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**function, "arguments": _to_json(function["arguments"])}}
        for call in message["tool_calls"]
        for function in [call["function"]]
    ]
    return {**message, "tool_calls": calls}


def _without_system(messages: Sequence[Message]) -> list[Message]:
    """Prepend the text of all system messages to the first user message."""
    system = [message["content"] for message in messages if message["role"] == "system"]
    others: list[Message] = [m for m in messages if m["role"] != "system"]
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


class _Namespace(jinja2.utils.Namespace):
    """Refuses names of Python's internals: code outside of the sandbox looks them up."""

    # Positional only, as a namespace may have an attribute `self`.
    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *given = args
        attributes = dict(*given, **kwargs)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no attributes like {name!r:.80}")


class _Dict:
    """Makes dicts, without the attributes of their type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    # Plain JSON: jinja's own filter escapes HTML.
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _Namespace
    environment.globals["dict"] = _Dict()
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
