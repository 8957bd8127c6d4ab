"""Reads a grammar in Lark's syntax: what it asks for that is not served, and how much of it may be
absent or repeat. Pure."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from gateway_svc.structured.errors import FormatError
from gateway_svc.structured.json_schemas import (
    json_terminal,
    num_schema_quantifiers,
    prepare_schema,
)
from gateway_svc.structured.json_values import read_json_within
from gateway_svc.structured.patterns import (
    MAX_QUANTIFIERS,
    may_repeat_one_text,
    num_quantifiers,
)

# Attributes of rules that the output follows.
_ATTRIBUTES: Final = frozenset({"lazy", "suffix", "stop", "max_tokens"})
_INITIAL_SKIP: Final = "allow_initial_skip"
_OPTIONS: Final = frozenset({"no_forcing", _INITIAL_SKIP})
# Of several such statements the last one counts.
_WITHOUT_FORCING: Final = '\n%llguidance {"no_forcing": true}\n'
# The library heeds it in a whole grammar only.
INITIAL_SKIP_IN_PART: Final = (
    f"has the option {_INITIAL_SKIP} of %llguidance, which has no effect where the grammar is a "
    "part of the format; leave it out, and let the rule start begin with what may be skipped"
)
# The library does not bound the states of what several expressions have to match at once: `&` of
# two repetitions takes gigabytes. A single complement (`~`) is none, that of another one may be.
_INTERSECTION: Final = {"&": 2, "~": 1}
_MAX_COMPLEMENTS: Final = 1
# The library writes terminals out within others, which nothing bounds.
_MAX_WRITTEN_OUT: Final = 100_000
# Behind a `~` that stands for repetition.
_COUNT: Final = re.compile(r"\s*\d")
# More than any limit.
_MANY: Final = 2**31
_STRING: Final = r'"(?:\\.|[^"\\\n])*"'
_TOKEN: Final = re.compile(
    rf"""
      (?P<space>\s+|//[^\n]*|\#[^\n]*)
    | (?P<text>{_STRING})i?
    | (?P<regex>/(?:\\.|[^/\\\n])+/)[imslux]*
    | %(?P<statement>\w+)
    | (?P<token><[^\s<>]+>)
    | (?P<open>["/])
    | [?!]{{0,2}}(?P<defined>[A-Za-z_]\w*)(?:\.-?\d+)?\s*
      (?:\[(?P<attributes>(?:{_STRING}|[^\]"]){{0,200}})\]\s*)?:
    | (?P<name>[A-Za-z_]\w*)
    | (?P<repeated>[?*+]|~|\{{\d)
    | (?P<other>.)
    """,
    re.VERBOSE | re.DOTALL,
)


@dataclass
class _Definition:
    """A rule or terminal. What it repeats or leaves out is counted as quantifiers."""

    is_terminal: bool = False
    num_quantifiers: int = 0
    num_complements: int = 0  # as in _INTERSECTION
    may_be_empty: bool = False
    # It has texts or regular expressions of its own.
    has_texts: bool = False
    # Of other rules and terminals, each time that they occur.
    names: list[str] = field(default_factory=list)


@dataclass
class LarkSource:
    """A grammar, with what was found in it. Places are empty for the grammar as a whole."""

    text: str = ""
    num_quantifiers: Counter[str] = field(default_factory=Counter)
    schemas: dict[str, dict[str, Any]] = field(default_factory=dict)
    # Regular expressions and grammars that are parts of it, as grammars of their own.
    parts: dict[str, str] = field(default_factory=dict)
    # What is ignored may be in front of the first text.
    has_initial_skip: bool = False
    # llguidance 1.9 appends what is forced before it computes a mask, and a terminal is greedy: in
    # `/a+/ "a"` nothing but another `a` may ever follow, and it never returns.
    may_be_endless: bool = False

    def without_endless_text(self) -> "LarkSource":
        """The grammar, of which nothing is forced if that might have no end."""
        text = self.text + _WITHOUT_FORCING if self.may_be_endless else self.text
        return replace(self, text=text)

    def add(self, part: "LarkSource", place: str) -> None:
        """Note what a part has."""
        self.num_quantifiers[place] += part.num_quantifiers.total()
        self.schemas.update((f"{place} {name}", one) for name, one in part.schemas.items())
        self.parts[place] = part.text
        self.may_be_endless |= part.may_be_endless

    def add_schema(self, schema: dict[str, Any], place: str) -> None:
        self.schemas[place] = schema
        self.num_quantifiers[place] += num_schema_quantifiers(schema)

    def check_quantifiers(self) -> None:
        """FormatError if there are too many."""
        found = self.num_quantifiers.total()
        if found > MAX_QUANTIFIERS:
            [(place, most)] = self.num_quantifiers.most_common(1)
            where = f", {most} of them at {place}" if place else ""
            raise FormatError(
                f"has {found} quantifiers{where}; at most {MAX_QUANTIFIERS} are allowed in a format"
            )


def read_lark(grammar: str) -> LarkSource:
    """The grammar, with its schemas as the library reads them well. FormatError for what is not
    served."""
    reader = _Reader(grammar)
    reader.read()
    _check_intersections(reader.definitions)
    _check_written_out(reader.definitions)
    own = sum(one.num_quantifiers for one in reader.definitions.values())
    source = reader.source
    source.num_quantifiers[""] += max([own, *_expanded(reader.definitions)])
    return source.without_endless_text()


class _Reader:
    def __init__(self, grammar: str) -> None:
        self.source = LarkSource()
        self.definitions: dict[str, _Definition] = {}
        self._grammar = grammar
        # Of what precedes the first definition.
        self._current = _Definition()
        # The last token, without spaces.
        self._last = ":"

    def read(self) -> None:
        written: list[str] = []
        at = 0
        while at < len(self._grammar):
            token = _TOKEN.match(self._grammar, at)
            assert token is not None
            at = token.end()
            written.append(token[0])
            if token["open"] is not None:
                raise FormatError(
                    f"has a text or regular expression without an end: {token[0]} at character "
                    f"{token.start()}"
                )
            if token["space"] is not None:
                continue
            if token["statement"] is not None:
                shown, at = self._statement(token["statement"], at)
                written.append(shown)
            elif token["defined"] is not None:
                self._define(token["defined"], token["attributes"] or "")
            else:
                self._add(token)
            self._last = ":" if token["defined"] is not None else token[0]
        self._end_of_option()
        self.source.text = "".join(written)

    def _define(self, name: str, attributes: str) -> None:
        self._end_of_option()
        for attribute in re.split(r",\s*", re.sub(_STRING, "", attributes)):
            key = attribute.partition("=")[0].strip()
            if key and key not in _ATTRIBUTES:
                known = ", ".join(sorted(_ATTRIBUTES))
                raise FormatError(
                    f"has the attribute {key!r:.40} at the rule {name}, which is not served; "
                    f"there are {known}"
                )
        is_terminal = name.lstrip("_")[:1].isupper()
        self._current = self.definitions.setdefault(name, _Definition(is_terminal))

    def _add(self, token: re.Match[str]) -> None:
        current = self._current
        if not _COUNT.match(self._grammar, token.end()):
            current.num_complements += _INTERSECTION.get(token[0], 0)
            self.source.may_be_endless |= token[0] == "~"
        # In a rule the library does not repeat greedily.
        self.source.may_be_endless |= current.is_terminal and token[0][0] in "*+{"
        current.has_texts |= token["text"] is not None or token["regex"] is not None
        if token["name"] is not None:
            current.names.append(token["name"])
        elif token["regex"] is not None:
            inner, _, flags = token["regex"][1:].rpartition("/")
            # One of the flags lets spaces and comments be ignored.
            self.source.may_be_endless |= "x" in flags or may_repeat_one_text(inner)
            number = num_quantifiers(token["regex"])
            current.num_quantifiers += number
            current.may_be_empty |= number > 0
        elif token["repeated"] is not None or token[0] == "[" or token["text"] == '""':
            current.num_quantifiers += 1
            current.may_be_empty |= token[0] != "+"
        elif token[0] in (")", "]"):
            self._end_of_option()
        elif token[0] == "|" and self._last in (":", "(", "[", "|"):
            self._empty_option()

    def _end_of_option(self) -> None:
        """What follows ends an option: it is empty if nothing is in front."""
        if self._last == "|":
            self._empty_option()

    def _empty_option(self) -> None:
        self._current.num_quantifiers += 1
        self._current.may_be_empty = True

    def _statement(self, name: str, at: int) -> tuple[str, int]:
        """What is written for the object behind `%json` or `%llguidance`, and where it ends."""
        if name not in ("json", "llguidance"):
            return "", at
        try:
            value, end = read_json_within(self._grammar, at)
        except FormatError as error:
            raise FormatError(f"%{name} at character {at} {error}") from error
        if name == "json":
            place = f"%json[{len(self.source.schemas)}]"
            schema = prepare_schema(value, place)
            self.source.add_schema(schema, place)
            return json_terminal(schema).removeprefix("%json") + "\n", end
        for key in value if isinstance(value, dict) else ():
            if key not in _OPTIONS:
                known = ", ".join(sorted(_OPTIONS))
                raise FormatError(
                    f"has the option {key!r:.40} of %llguidance, which is not served; "
                    f"there are {known}"
                )
        if isinstance(value, dict) and value.get(_INITIAL_SKIP):
            self.source.has_initial_skip = True
        return self._grammar[at:end] + "\n", end


def _expanded(definitions: Mapping[str, _Definition]) -> Iterator[int]:
    """The quantifiers of each definition with those that its names stand for: all of a terminal
    within another one, and one for what may be empty in a rule."""
    quantifiers = {name: one.num_quantifiers for name, one in definitions.items()}
    totals: dict[str, int] = {}
    may_be_empty = _may_be_empty(definitions)
    for name, one in definitions.items():
        if not one.is_terminal:
            yield one.num_quantifiers + sum(other in may_be_empty for other in one.names)
        else:
            yield _total(name, definitions, quantifiers, totals)


def _check_intersections(definitions: Mapping[str, _Definition]) -> None:
    own = {name: one.num_complements for name, one in definitions.items()}
    totals: dict[str, int] = {}
    for name, one in definitions.items() if any(own.values()) else ():
        found = _total(name, definitions, own, totals) if one.is_terminal else own[name]
        if found > _MAX_COMPLEMENTS:
            raise FormatError(
                f"has an operator & or several ~ at {name}, with those of the terminals in it; "
                "intersections are not served"
            )


def _check_written_out(definitions: Mapping[str, _Definition]) -> None:
    own = {name: 1 + len(one.names) for name, one in definitions.items()}
    totals: dict[str, int] = {}
    for name, one in definitions.items():
        if one.is_terminal and _total(name, definitions, own, totals) > _MAX_WRITTEN_OUT:
            raise FormatError(
                f"has the terminal {name:.40}, which is more than {_MAX_WRITTEN_OUT} parts with "
                "the terminals in it; use rules, in lower case, or fewer"
            )


def _total(
    name: str,
    definitions: Mapping[str, _Definition],
    own: Mapping[str, int],
    totals: dict[str, int],
) -> int:
    """What a terminal has, by `own`, with what the terminals in it have, up to _MANY. Terminals
    that contain themselves are refused by the library."""
    # Depth first, without recursion: terminals may form a chain of thousands.
    waiting = {name: iter(definitions[name].names)}
    while waiting:
        current, names = next(reversed(waiting.items()))
        inner = next(
            (
                other
                for other in names
                if other in definitions and other not in totals and other not in waiting
            ),
            None,
        )
        if inner is not None:
            waiting[inner] = iter(definitions[inner].names)
            continue
        del waiting[current]
        inside = definitions[current].names
        total = own[current] + sum(totals.get(other, 0) for other in inside)
        totals[current] = min(total, _MANY)
    return totals[name]


def _may_be_empty(definitions: Mapping[str, _Definition]) -> set[str]:
    """The names of what may be empty: by its own quantifiers, or as all that it consists of is."""
    users: dict[str, list[str]] = {}
    num_others = {name: len(one.names) for name, one in definitions.items()}
    for name, one in definitions.items():
        for other in one.names:
            users.setdefault(other, []).append(name)
    found = {name for name, one in definitions.items() if one.may_be_empty}
    new = [*found]
    while new:
        for user in users.get(new.pop(), ()):
            num_others[user] -= 1
            if not num_others[user] and user not in found and not definitions[user].has_texts:
                found.add(user)
                new.append(user)
    return found
