"""Formats that an output follows."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from quire.client.arguments import check_flag, check_json, check_text, check_texts, wrong_type
from quire.v1 import structured_output_pb2


@dataclass(frozen=True, kw_only=True)
class StructuredOutput:
    """A format of the output; exactly one field is set.

    The server validates the format. TypeError or ValueError here only if a message cannot contain
    it.
    """

    # A JSON Schema, as JSON or as an object; True: any JSON.
    json: str | Mapping[str, Any] | bool | None = None
    # True: any JSON object.
    json_object: bool | None = None
    # Matches the output as a whole.
    regex: str | None = None
    # The output is one of these texts.
    choice: Sequence[str] | None = None
    # In Lark's syntax with the rule `start`, or in EBNF with the rule `root`.
    grammar: str | None = None
    # As JSON or as an object, in vLLM's form.
    structural_tag: str | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check_flag("json_object", self.json_object)
        check_text("regex", self.regex)
        check_texts("choice", self.choice)
        check_text("grammar", self.grammar)
        if not isinstance(self.json, bool):
            _check_json_or_text("json", self.json)
        _check_json_or_text("structural_tag", self.structural_tag)
        given = [one.name for one in fields(self) if getattr(self, one.name) is not None]
        if self.json_object is False:
            given.remove("json_object")
        if len(given) != 1:
            found = ", ".join(given) or "none"
            raise ValueError(f"StructuredOutput: exactly one field must be set (got {found})")

    def to_proto(self) -> structured_output_pb2.StructuredOutput:
        message = structured_output_pb2.StructuredOutput()
        if self.json is not None:
            message.json_schema = _as_json(self.json)
        elif self.json_object:
            message.json_object.SetInParent()
        elif self.regex is not None:
            message.regex = self.regex
        elif self.choice is not None:
            message.choice.CopyFrom(structured_output_pb2.Texts(texts=self.choice))
        elif self.grammar is not None:
            message.grammar = self.grammar
        elif self.structural_tag is not None:
            message.structural_tag = _as_json(self.structural_tag)
        return message


def _check_json_or_text(name: str, value: object) -> None:
    if isinstance(value, str | None):
        check_text(name, value)
    elif isinstance(value, Mapping):
        check_json(name, value)
    else:
        raise wrong_type(name, "JSON as a text or an object", value)


def _as_json(value: str | Mapping[str, Any] | bool) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value if isinstance(value, bool) else dict(value))
