"""Structural tags, in vLLM's JSON forms, as grammars in Lark's syntax.

The older form has `structures` and `triggers`; the other one has a tree of formats under `format`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

from llguidance import LLTokenizer

from gateway_svc.structured.errors import FormatError
from gateway_svc.structured.json_schemas import json_terminal, prepare_schema
from gateway_svc.structured.json_values import read_json
from gateway_svc.structured.lark import grammar_to_lark, quoted, regex_to_lark
from gateway_svc.structured.lark_source import INITIAL_SKIP_IN_PART, LarkSource
from gateway_svc.structured.patterns import may_repeat_one_text

_TEXT: Final = r"/(.|\n)*/"
_Node = Mapping[str, Any]


@dataclass(frozen=True)
class _Kind:
    """A format of the tree: how it is written, and the keys that it has beside `type`."""

    write: Callable[[_Node, str], str]
    required: Mapping[str, type | tuple[type, ...]]
    optional: Mapping[str, type | tuple[type, ...]]


def structural_tag_to_lark(text: str, tokenizer: LLTokenizer) -> LarkSource:
    """FormatError if it is refused."""
    tag = read_json(text)
    if not isinstance(tag, dict):
        raise FormatError("is not an object")
    writer = _Writer(tokenizer)
    try:
        if "structures" in tag:
            start = writer.structures(tag)
        else:
            _check_keys(tag, "#", {"format": dict}, {"type": str})
            start = writer.expression(tag["format"], "#/format")
    except RecursionError as error:
        raise FormatError("is nested too deeply") from error
    if tag.get("type", "structural_tag") != "structural_tag":
        raise FormatError(f"has the type {tag['type']!r:.40} at #; it is structural_tag")
    writer.source.text = "\n".join([f"start: {start}", *writer.rules])
    return writer.source.without_endless_text()


class _Writer:
    """Writes formats as expressions; the rules that they need are added to `rules`."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self.source = LarkSource()
        self.rules: list[str] = []
        self._tokenizer = tokenizer
        # A part of places that the client writes otherwise.
        self._schema_key = ("", "")
        any_schema = (dict, bool)
        ends = (str, list)
        flags = {"at_least_one": bool, "stop_after_first": bool}
        self._kinds: Mapping[str, _Kind] = {
            "const_string": _Kind(self._constant, {"value": str}, {}),
            "json_schema": _Kind(self._json_schema, {"json_schema": any_schema}, {}),
            "regex": _Kind(self._regex, {"pattern": str}, {}),
            "grammar": _Kind(self._grammar, {"grammar": str}, {}),
            "any_text": _Kind(lambda node, path: self._terminal(_TEXT), {}, {}),
            "sequence": _Kind(self._sequence, {"elements": list}, {}),
            "or": _Kind(self._or, {"elements": list}, {}),
            "tag": _Kind(self._tag, {"begin": str, "content": dict, "end": ends}, {}),
            "triggered_tags": _Kind(self._triggered_tags, {"triggers": list, "tags": list}, flags),
            "tags_with_separator": _Kind(
                self._separated_tags, {"tags": list, "separator": str}, flags
            ),
        }

    def expression(self, node: Any, path: str, default: str = "") -> str:
        """A format at a place. `default` is the type of one without."""
        if not isinstance(node, dict):
            raise FormatError(f"has no object at {path}")
        name = node.get("type", default)
        kind = self._kinds.get(name) if isinstance(name, str) else None
        if kind is None or (default and name != default):
            known = default or ", ".join(self._kinds)
            raise FormatError(f"has the type {name!r:.40} at {path}; there are {known}")
        _check_keys(node, path, kind.required, {**kind.optional, "type": str})
        return f"({kind.write(node, path)})"

    def structures(self, tag: _Node) -> str:
        """The older form, as `triggered_tags`."""
        _check_keys(tag, "#", {"structures": list, "triggers": list}, {"type": str})
        tags = []
        for at, structure in enumerate(_objects(tag, "structures", "#")):
            path = f"#/structures/{at}"
            _check_keys(structure, path, {"begin": str, "end": str}, {"schema": (dict, bool)})
            content = {"type": "json_schema", "json_schema": structure.get("schema", True)}
            tags.append({"begin": structure["begin"], "content": content, "end": structure["end"]})
        node = {"triggers": tag["triggers"], "structures": tags}
        self._schema_key = ("/content/json_schema", "/schema")
        return self._triggered_tags(node, "#", "structures")

    def _triggered_tags(self, node: _Node, path: str, key: str = "tags") -> str:
        """Text, with a tag wherever a trigger occurs. With `at_least_one` it begins with a tag."""
        triggers = node["triggers"]
        if not all(isinstance(trigger, str) and trigger for trigger in triggers):
            raise FormatError(f"has a trigger at {path}/triggers that is no text, or empty")
        tags = _objects(node, key, path)
        if not triggers or not tags:
            raise FormatError(f"has no triggers or no tags at {path}")
        by_trigger = {trigger: list[str]() for trigger in triggers}
        for at, tag in enumerate(tags):
            begin = tag.get("begin")
            if not isinstance(begin, str):
                raise FormatError(f"has no text `begin` at {path}/{key}/{at}")
            trigger = next((one for one in triggers if begin.startswith(one)), None)
            if not trigger:
                raise FormatError(
                    f"has a tag at {path}/{key}/{at} that begins with none of the triggers: "
                    f"{begin!r:.80}"
                )
            rest = {**tag, "begin": begin[len(trigger) :]}
            by_trigger[trigger].append(self.expression(rest, f"{path}/{key}/{at}", "tag"))
        used = {trigger: rests for trigger, rests in by_trigger.items() if rests}
        text = self._terminal(_TEXT)
        later = _any(f"{self._until(trigger)} ({_any(rests)})" for trigger, rests in used.items())
        mark = "?" if node.get("stop_after_first") else "*"
        if not node.get("at_least_one"):
            return f"({later}){mark} {text}"
        first = _any(f"{self._literal(trigger)} ({_any(rests)})" for trigger, rests in used.items())
        return f"({first})" if mark == "?" else f"({first}) ({later})* {text}"

    def _separated_tags(self, node: _Node, path: str) -> str:
        tags = _any(
            self.expression(tag, f"{path}/tags/{at}", "tag")
            for at, tag in enumerate(_objects(node, "tags", path))
        )
        separator = self._literal(node["separator"])
        one = f"({tags})"
        several = one if node.get("stop_after_first") else f"{one} ({separator} {one})*"
        if node.get("at_least_one"):
            return several
        self.source.num_quantifiers[path] += 1
        return f"({several})?"

    def _tag(self, node: _Node, path: str) -> str:
        begin = self._literal(node["begin"])
        content, ends = node["content"], node["end"]
        ends = [ends] if isinstance(ends, str) else ends
        if not ends or not all(isinstance(end, str) for end in ends):
            raise FormatError(f"has no text or texts at {path}/end")
        if content.get("type") == "any_text" and all(ends):
            # The text goes on to the first of the ends.
            _check_keys(content, f"{path}/content", {}, {"type": str})
            return f"{begin} ({_any(map(self._until, ends))})"
        inner = self.expression(content, f"{path}/content")
        return f"{begin} {inner} ({_any(map(self._literal, ends))})"

    def _constant(self, node: _Node, path: str) -> str:
        return self._literal(node["value"])

    def _sequence(self, node: _Node, path: str) -> str:
        return " ".join(self._elements(node, path))

    def _or(self, node: _Node, path: str) -> str:
        # One of them may be empty.
        self.source.num_quantifiers[path] += 1
        return _any(self._elements(node, path))

    def _elements(self, node: _Node, path: str) -> list[str]:
        if not node["elements"]:
            raise FormatError(f"has no elements at {path}/elements")
        return [
            self.expression(element, f"{path}/elements/{at}")
            for at, element in enumerate(node["elements"])
        ]

    def _json_schema(self, node: _Node, path: str) -> str:
        place = f"{path}/json_schema".replace(*self._schema_key)
        schema = prepare_schema(node["json_schema"], place)
        self.source.add_schema(schema, place)
        return json_terminal(schema)

    def _regex(self, node: _Node, path: str) -> str:
        place = f"{path}/pattern"
        try:
            source = regex_to_lark(node["pattern"])
        except FormatError as error:
            raise FormatError(f"{error}, in the pattern at {place}") from error
        source.may_be_endless = may_repeat_one_text(node["pattern"])
        self.source.add(source, place)
        return self._terminal(source.text.removeprefix("start: "))

    def _grammar(self, node: _Node, path: str) -> str:
        place = f"{path}/grammar"
        try:
            source = grammar_to_lark(node["grammar"])
            if source.has_initial_skip:
                raise FormatError(INITIAL_SKIP_IN_PART)
        except FormatError as error:
            raise FormatError(f"{error}, in the grammar at {place}") from error
        self.source.add(source, place)
        return f"%lark {{\n{source.text}\n}}"

    def _literal(self, text: str) -> str:
        """Text as the model writes it: special tokens by their ids."""
        parts = []
        token_ids = self._tokenizer.tokenize_str(text, parse_special=True)
        for special, group in groupby(token_ids, self._tokenizer.is_special_token):
            if special:
                parts += [f"<[{token_id}]>" for token_id in group]
            else:
                parts.append(quoted(self._tokenizer.decode_str(list(group))))
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


def _any(expressions: Iterable[str]) -> str:
    return " | ".join(expressions)


def _check_keys(
    node: _Node,
    path: str,
    required: Mapping[str, type | tuple[type, ...]],
    optional: Mapping[str, type | tuple[type, ...]],
) -> None:
    """FormatError for a key that is missing, unknown or of another type."""
    known = {**required, **optional}
    for key in node:
        if key not in known:
            raise FormatError(
                f"has the unknown key {key!r:.40} at {path}; there are {', '.join(known)}"
            )
    for key, kinds in known.items():
        if key in node and not isinstance(node[key], kinds):
            raise FormatError(
                f"has a value of another type at {path}/{key}: {_words(kinds)} is needed"
            )
    for key in required:
        if key not in node:
            raise FormatError(f"has no {key!r} at {path}, which is needed")


_WORDS: Final = {str: "a text", list: "a list", dict: "an object", bool: "true or false"}


def _words(kinds: type | tuple[type, ...]) -> str:
    return " or ".join(_WORDS[kind] for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))


def _objects(node: _Node, key: str, path: str) -> list[_Node]:
    for at, value in enumerate(node[key]):
        if not isinstance(value, dict):
            raise FormatError(f"has no object at {path}/{key}/{at}")
    return list(node[key])
