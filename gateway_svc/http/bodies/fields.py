"""Types of the fields of HTTP requests, and how their values reach the messages."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from google.protobuf import struct_pb2
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from quire.service.errors import invalid
from quire.v1 import inference_pb2

UINT32_MAX = 2**32 - 1
# Of objects that become a Struct; protobuf refuses deeper messages.
_MAX_DEPTH = 24
# Each takes a byte at least in a message, and any such object may have at most 16 KiB. Protobuf's
# library takes seconds for a million of them.
_MAX_VALUES = 2**14
# Of schemas and formats: orjson writes 254 levels, with those of a response around them.
_MAX_JSON_DEPTH = 240

Count = Annotated[int, Field(ge=1, le=UINT32_MAX)]
TokenId = Annotated[int, Field(ge=0, le=UINT32_MAX)]
# Of a list with a million invalid entries only the first one is reported, in milliseconds.
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]


def at_most_deep(levels: int) -> Callable[[Any], Any]:
    """A check that a field's value is not nested in more levels."""

    def check(value: Any) -> Any:
        level = [value]
        for _ in range(levels):
            level = _inner(level)
            if not level:
                return value
        message = "is nested in more than {levels} levels"
        raise PydanticCustomError("too_deep", message, {"levels": levels})

    return check


# Deeper values could not be written as JSON.
check_depth = at_most_deep(_MAX_JSON_DEPTH)
JsonObject = Annotated[dict[str, Any], AfterValidator(check_depth)]
# What a client knows about caching and speed. It changes nothing: every prefix is cached.
Hint = dict[str, Any]
# All are served alike; a request's precedence is its `priority`.
ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast"]
# OpenAI's reference has written the first one with a hyphen, too.
CacheRetention = Literal["in_memory", "in-memory", "24h"]

# How long an output should be. It changes nothing: chat templates have no variable for it.
Verbosity = Literal["low", "medium", "high"]


class HttpRequest(BaseModel):
    """A request's body. Unknown fields and values of other types are refused."""

    model_config = ConfigDict(
        extra="forbid", strict=True, protected_namespaces=(), allow_inf_nan=False
    )


def unsupported(*accepted: object) -> Any:
    """The type of a field of the API that is not served: it is refused, unless its value is null
    or one that changes nothing."""
    names = ", ".join(["null", *(repr(value) for value in accepted)])

    def check(value: object) -> object:
        # 0 is False, but `1` is not a flag.
        if value is None or any(value == one for one in accepted):
            return value
        raise PydanticCustomError(
            "unsupported", "is not supported; accepted: {accepted}", {"accepted": names}
        )

    schema = {"description": f"Not supported. Accepted: {names}."}
    return Annotated[Any, BeforeValidator(check), WithJsonSchema(schema)]


def replaced_by(name: str) -> Any:
    """The type of a field that other servers had, and that another one replaces."""

    def check(value: object) -> object:
        if value is None:
            return value
        raise PydanticCustomError("unsupported", "is not supported; use {name}", {"name": name})

    schema = {"description": f"Not supported; use `{name}`."}
    return Annotated[Any, BeforeValidator(check), WithJsonSchema(schema)]


def struct_of(field: str, values: dict[str, Any] | None) -> struct_pb2.Struct | None:
    """The message of an object; None if it is empty. RequestError if it is nested so deeply that
    protobuf would refuse to parse it, or has more values than any limit allows."""
    if not values:
        return None
    _check_shape(field, values)
    struct = struct_pb2.Struct()
    struct.update(values)
    return struct


def _check_shape(field: str, values: dict[str, Any]) -> None:
    level: list[Any] = [values]
    num_values = 0
    for _ in range(_MAX_DEPTH):
        parents = [value for value in level if isinstance(value, dict | list)]
        num_values += sum(map(len, parents))
        if num_values > _MAX_VALUES:
            raise invalid(
                field,
                "TOO_MANY_VALUES",
                f"has more than {_MAX_VALUES} values, nested ones included",
            )
        level = _inner(parents)
    if level:
        raise invalid(field, "TOO_DEEP", f"is nested in more than {_MAX_DEPTH} levels")


def _inner(values: list[Any]) -> list[Any]:
    """What is in the objects and arrays among the values."""
    return [
        inner
        for value in values
        if isinstance(value, dict | list)
        for inner in (value.values() if isinstance(value, dict) else value)
    ]


# Builds the message of one prompt; the type depends on `stream`.
GenerationMessage = inference_pb2.GenerateRequest | inference_pb2.StreamGenerateRequest
MessageType = Callable[..., GenerationMessage]


def message_type(is_stream: bool) -> MessageType:
    return inference_pb2.StreamGenerateRequest if is_stream else inference_pb2.GenerateRequest


def prompt_id(request_id: str, prompt: int) -> str:
    """The id of the generation of one prompt: the request's own for the first one."""
    return f"{request_id}-{prompt}" if prompt else request_id


def request_id_of(prompt_id: str, prompt: int) -> str:
    """The id of the request, from that of the generation of one of its prompts."""
    return prompt_id.removesuffix(f"-{prompt}") if prompt else prompt_id
