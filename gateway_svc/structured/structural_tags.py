"""Structural tags, in vLLM's JSON forms, as grammars in Lark's syntax.

The older form has `structures` and `triggers`; the other one has a tree of formats under `format`.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from typing import Any, Final

from llguidance import LLTokenizer

from gateway_svc.structured.json_schemas import FORM, prepare_schema
from gateway_svc.structured.lark import regex_to_lark, to_lark

_TEXT: Final = r"/(.|\n)*/"


class TagError(ValueError):
    """A structural tag that is refused; the message has the reason."""


def structural_tag_to_lark(text: str, tokenizer: LLTokenizer) -> str:
    """TagError or SchemaError if it is refused."""
    try:
        tag = json.loads(text)
    except ValueError as error:
        raise TagError(f"is not JSON: {error}") from error
    except RecursionError as error:
        raise TagError("is nested too deeply") from error
    if not isinstance(tag, dict):
        raise TagError("is not an object")
    writer = _Writer(tokenizer)
    if "structures" in tag:
        start = writer.triggered_tags(_of_structures(tag))
    else:
        start = writer.expression(_required(tag, "format", dict))
    return "\n".join([f"start: {start}", *writer.rules])


def _of_structures(tag: Mapping[str, Any]) -> Mapping[str, Any]:
    """The older form as `triggered_tags`."""
    return {
        "triggers": tag.get("triggers"),
        "tags": [
            {
                "begin": structure.get("begin"),
                "content": {"type": "json_schema", "json_schema": structure.get("schema", {})},
                "end": structure.get("end"),
            }
            for structure in _items(tag, "structures")
        ],
    }


class _Writer:
    """Writes formats as expressions; the rules that they need are added to `rules`."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self.rules: list[str] = []
        self._kinds: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
            "const_string": lambda node: self._literal(_required(node, "value", str)),
            "json_schema": self._json_schema,
            "regex": lambda node: self._regex(_required(node, "pattern", str)),
            "grammar": self._grammar,
            "any_text": lambda _: self._terminal(_TEXT),
            "sequence": lambda node: " ".join(map(self.expression, _items(node, "elements"))),
            "or": lambda node: self._any(map(self.expression, _items(node, "elements"))),
            "tag": self._tag,
            "triggered_tags": self.triggered_tags,
            "tags_with_separator": self._separated_tags,
        }

    def expression(self, node: Mapping[str, Any]) -> str:
        kind = node.get("type")
        if not isinstance(kind, str) or kind not in self._kinds:
            raise TagError(f"has the type {kind!r}; there are {', '.join(self._kinds)}")
        return f"({self._kinds[kind](node)})"

    def triggered_tags(self, node: Mapping[str, Any]) -> str:
        """Text, with a tag wherever a trigger occurs. With `at_least_one` it begins with a tag."""
        triggers = _items(node, "triggers", str)
        tags = _items(node, "tags")
        if not triggers or not tags:
            raise TagError("has no triggers or no tags")
        by_trigger = {trigger: list[str]() for trigger in triggers}
        for tag in tags:
            begin = _required(tag, "begin", str)
            trigger = next((one for one in triggers if begin.startswith(one)), None)
            if not trigger:
                raise TagError(f"has a tag that begins with none of the triggers: {begin!r}")
            rest = {**tag, "begin": begin[len(trigger) :]}
            by_trigger[trigger].append(self._tag(rest))
        used = {trigger: rests for trigger, rests in by_trigger.items() if rests}
        text = self._terminal(_TEXT)
        later = self._any(
            f"{self._until(trigger)} ({self._any(rests)})" for trigger, rests in used.items()
        )
        mark = "?" if node.get("stop_after_first") else "*"
        if not node.get("at_least_one"):
            return f"({later}){mark} {text}"
        first = self._any(
            f"{self._literal(trigger)} ({self._any(rests)})" for trigger, rests in used.items()
        )
        return f"({first})" if mark == "?" else f"({first}) ({later})* {text}"

    def _separated_tags(self, node: Mapping[str, Any]) -> str:
        tags = self._any(map(self._tag, _items(node, "tags")))
        separator = self._literal(_required(node, "separator", str))
        one = f"({tags})"
        several = one if node.get("stop_after_first") else f"{one} ({separator} {one})*"
        return several if node.get("at_least_one") else f"({several})?"

    def _tag(self, node: Mapping[str, Any]) -> str:
        begin = self._literal(_required(node, "begin", str))
        content = _required(node, "content", dict)
        ends = node.get("end")
        ends = [ends] if isinstance(ends, str) else ends
        if not isinstance(ends, list) or not all(isinstance(end, str) for end in ends):
            raise TagError("has a tag whose `end` is neither text nor a list of texts")
        if content.get("type") == "any_text" and all(ends):
            # The text goes on to the first of the ends.
            return f"{begin} ({self._any(map(self._until, ends))})"
        return f"{begin} {self.expression(content)} ({self._any(map(self._literal, ends))})"

    def _json_schema(self, node: Mapping[str, Any]) -> str:
        schema = prepare_schema(node.get("json_schema"))
        return f"%json {json.dumps({**schema, 'x-guidance': FORM}, ensure_ascii=False)}"

    def _regex(self, pattern: str) -> str:
        return self._terminal(regex_to_lark(pattern).removeprefix("start: "))

    def _grammar(self, node: Mapping[str, Any]) -> str:
        return f"%lark {{\n{to_lark(_required(node, 'grammar', str))}\n}}"

    def _literal(self, text: str) -> str:
        """Text as the model writes it: special tokens by their ids."""
        parts = []
        token_ids = self._tokenizer.tokenize_str(text, parse_special=True)
        for special, group in groupby(token_ids, self._tokenizer.is_special_token):
            if special:
                parts += [f"<[{token_id}]>" for token_id in group]
            else:
                parts.append(_quoted(self._tokenizer.decode_str(list(group))))
        return " ".join(parts) or '""'

    def _until(self, text: str) -> str:
        """Anything up to the first occurrence of a text, and that."""
        literal = self._literal(text)
        if literal.startswith("<["):
            return f"{self._terminal(_TEXT)} {literal}"
        plain, _, special = literal.partition(" <[")
        rule = self._name("until")
        self.rules.append(f"{rule}[lazy]: {_TEXT} {plain}")
        return f"{rule} <[{special}" if special else rule

    def _terminal(self, pattern: str) -> str:
        name = self._name("TEXT")
        self.rules.append(f"{name}: {pattern}")
        return name

    def _name(self, kind: str) -> str:
        return f"{kind}_{len(self.rules)}"

    def _any(self, expressions: Iterable[str]) -> str:
        return " | ".join(expressions)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _required(node: Mapping[str, Any], key: str, kind: type) -> Any:
    value = node.get(key)
    if not isinstance(value, kind):
        raise TagError(f"has no `{key}` where it needs one")
    return value


def _items(node: Mapping[str, Any], key: str, kind: type = dict) -> list[Any]:
    values = node.get(key)
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise TagError(f"has no list `{key}` where it needs one")
    return values
