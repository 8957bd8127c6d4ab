"""Fields that ask for a format of the output, and the message that they become."""

from typing import Annotated, Any, Literal

import orjson
from pydantic import AfterValidator, Field

from gateway_svc.http.bodies.fields import HttpRequest, JsonObject, check_depth, unsupported
from quire.service.errors import invalid
from quire.v1 import structured_output_pb2

_MAX_NAME = 64
# Booleans are schemas, too: of any value, and of none.
JsonSchema = Annotated[dict[str, Any] | bool, AfterValidator(check_depth)]
SchemaName = Annotated[str, Field(min_length=1, max_length=_MAX_NAME)]
# Names of the HTTP API for the fields of the message, for errors.
_FIELD = "structured_output"
RESPONSE_FORMAT_NAMES = {
    _FIELD: "response_format",
    f"{_FIELD}.json_schema": "response_format.json_schema.schema",
    f"{_FIELD}.json_object": "response_format",
    f"{_FIELD}.structural_tag": "response_format",
}
OBJECT_FORMAT_NAMES = {_FIELD: "response_format", f"{_FIELD}.json_schema": "response_format.value"}
STRUCTURED_OUTPUTS_NAMES = {
    _FIELD: "structured_outputs",
    f"{_FIELD}.json_schema": "structured_outputs.json",
}
TEXT_FORMAT_NAMES = {
    _FIELD: "text.format",
    f"{_FIELD}.json_schema": "text.format.schema",
    f"{_FIELD}.json_object": "text.format",
}
OUTPUT_CONFIG_NAMES = {
    _FIELD: "output_config.format",
    f"{_FIELD}.json_schema": "output_config.format.schema",
}
OUTPUT_FORMAT_NAMES = {_FIELD: "output_format", f"{_FIELD}.json_schema": "output_format.schema"}
# By the field of the body.
FORMAT_NAMES = {
    "response_format": RESPONSE_FORMAT_NAMES,
    "response_format.value": OBJECT_FORMAT_NAMES,
    "structured_outputs": STRUCTURED_OUTPUTS_NAMES,
    "text": TEXT_FORMAT_NAMES,
    "output_config": OUTPUT_CONFIG_NAMES,
    "output_format": OUTPUT_FORMAT_NAMES,
}


class JsonSchemaFormat(HttpRequest):
    """A schema with its name and description, which change nothing. The output follows it, strict
    or not."""

    name: SchemaName
    description: str | None = None
    schema_: Annotated[JsonSchema | None, Field(alias="schema")] = None
    strict: bool | None = None


class OutputFormat(HttpRequest):
    """OpenAI's formats, and vLLM's `structural_tag`, whose fields are the others."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    # The schema of a `json_object`, as huggingface_hub sends it: text-generation-inference's form.
    value: JsonSchema | None = None
    structures: list[JsonObject] | None = None
    triggers: list[str] | None = None
    format: JsonObject | None = None

    def to_proto(self) -> structured_output_pb2.StructuredOutput | None:
        """None for text."""
        if self.value is not None and self.type != "json_object":
            raise invalid(
                "response_format.value", "INVALID_FIELD", "is for the type json_object alone"
            )
        if self.type == "json_schema":
            if self.json_schema is None:
                raise invalid("response_format.json_schema", "MISSING_FIELD", "is required")
            return of_schema(
                _required("response_format.json_schema.schema", self.json_schema.schema_)
            )
        if self.json_schema is not None:
            raise invalid(
                "response_format.json_schema", "INVALID_FIELD", "is for the type json_schema alone"
            )
        tag = {
            name: value
            for name in ("structures", "triggers", "format")
            if (value := getattr(self, name)) is not None
        }
        if self.type == "structural_tag":
            text = orjson.dumps({"type": self.type, **tag}).decode()
            return structured_output_pb2.StructuredOutput(structural_tag=text)
        for name in tag:
            raise invalid(
                f"response_format.{name}", "INVALID_FIELD", "is for the type structural_tag alone"
            )
        if self.value is not None:
            return of_schema(_required("response_format.value", self.value))
        return any_object() if self.type == "json_object" else None


class StructuredOutputs(HttpRequest):
    """vLLM's formats; exactly one is set."""

    json_: Annotated[str | JsonSchema | None, Field(alias="json")] = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | JsonObject | None = None
    disable_fallback: unsupported(False) = None  # type: ignore[valid-type]
    disable_any_whitespace: unsupported(False) = None  # type: ignore[valid-type]
    disable_additional_properties: unsupported(False) = None  # type: ignore[valid-type]
    whitespace_pattern: unsupported() = None  # type: ignore[valid-type]

    def to_proto(self) -> structured_output_pb2.StructuredOutput:
        formats = {
            "json_schema": None if self.json_ is None else _as_json(self.json_),
            "regex": self.regex,
            "choice": (
                None if self.choice is None else structured_output_pb2.Texts(texts=self.choice)
            ),
            "grammar": self.grammar,
            "json_object": structured_output_pb2.JsonObject() if self.json_object else None,
            "structural_tag": (
                None if self.structural_tag is None else _as_json(self.structural_tag)
            ),
        }
        given: dict[str, Any] = {
            name: value for name, value in formats.items() if value is not None
        }
        if len(given) != 1:
            raise invalid(
                "structured_outputs",
                "NOT_ONE_FORMAT",
                f"has {len(given)} formats; exactly 1 is needed",
            )
        return structured_output_pb2.StructuredOutput(**given)


class TextFormat(HttpRequest):
    """The formats of `/v1/responses`."""

    type: Literal["text", "json_object", "json_schema"]
    name: SchemaName | None = None
    description: str | None = None
    schema_: Annotated[JsonSchema | None, Field(alias="schema")] = None
    strict: bool | None = None

    def to_proto(self) -> structured_output_pb2.StructuredOutput | None:
        """None for text."""
        if self.type != "json_schema":
            for name in ("name", "description", "schema", "strict"):
                if getattr(self, "schema_" if name == "schema" else name) is not None:
                    raise invalid(
                        f"text.format.{name}", "INVALID_FIELD", "is for the type json_schema alone"
                    )
            return any_object() if self.type == "json_object" else None
        if self.name is None:
            raise invalid("text.format.name", "MISSING_FIELD", "is required")
        return of_schema(_required("text.format.schema", self.schema_))


def of_schema(schema: JsonSchema) -> structured_output_pb2.StructuredOutput:
    """JSON that follows a schema."""
    return structured_output_pb2.StructuredOutput(json_schema=_as_json(schema))


def _required(field: str, schema: JsonSchema | None) -> JsonSchema:
    """RequestError at `field` without a schema."""
    if schema is None:
        raise invalid(
            field, "MISSING_FIELD", "is required; the type json_object stands for any object"
        )
    return schema


def any_object() -> structured_output_pb2.StructuredOutput:
    return structured_output_pb2.StructuredOutput(json_object=structured_output_pb2.JsonObject())


def _as_json(value: str | JsonSchema) -> str:
    return value if isinstance(value, str) else orjson.dumps(value).decode()
