"""Reads and checks the bodies of requests without blocking the event loop."""

import asyncio
from typing import TypeVar

import grpc
import orjson
from fastapi import Request
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from gateway_svc.http.bodies.fields import HttpRequest
from quire.service.errors import RequestError, failed, invalid

R = TypeVar("R", bound=HttpRequest)

# Larger ones are parsed in a thread.
_INLINE_BYTES = 2**15


async def read_body(request: Request, kind: type[R], max_bytes: int) -> R:
    """Read a body of at most `max_bytes` as JSON of the given type. RequestError names the field
    that is invalid."""
    data = await _read(request, max_bytes)
    if len(data) <= _INLINE_BYTES:
        return _parse(data, kind)
    return await asyncio.to_thread(_parse, data, kind)


async def _read(request: Request, max_bytes: int) -> bytes:
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > max_bytes:
        raise _too_large(max_bytes)
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(data)


def _too_large(max_bytes: int) -> RequestError:
    return failed(
        grpc.StatusCode.INVALID_ARGUMENT,
        "REQUEST_TOO_LARGE",
        f"the body has more than {max_bytes} bytes, the most that the model's context could need",
    )


def _parse(data: bytes, kind: type[R]) -> R:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise failed(
            grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_JSON", f"the body is not JSON: {error}"
        ) from error
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        # The input is not part of the errors: it may be a prompt.
        details = error.errors(include_input=False, include_url=False)
        raise _invalid(details) from None


def _invalid(details: list[ErrorDetails]) -> RequestError:
    """The error of the first invalid field: of a union's alternatives, the one that fits best."""
    alternatives = [one for one in details if one["loc"][:1] == details[0]["loc"][:1]]
    first = max(alternatives, key=lambda one: len(one["loc"]))
    if first["type"] == "extra_forbidden":
        name = _path(first["loc"])
        return invalid(name, "UNKNOWN_FIELD", "is not a field of this request; remove it")
    field = _path(first["loc"])
    if first["type"] == "missing":
        return invalid(field or "body", "MISSING_FIELD", "is required")
    reason = "UNSUPPORTED_FIELD" if first["type"] == "unsupported" else "INVALID_FIELD"
    return invalid(field or "body", reason, _sentence(first["msg"]))


def _path(loc: tuple[int | str, ...]) -> str:
    """A path such as `messages[0].content`, without pydantic's names of a union's members."""
    parts: list[str] = []
    for part in loc:
        if isinstance(part, int):
            parts.append(f"[{part}]")
        elif part.isidentifier() and not _is_member(part):
            parts.append(f".{part}" if parts else part)
    return "".join(parts)


def _is_member(part: str) -> bool:
    """Whether a part of a location names a member of a union: a type, or a class."""
    return part in ("str", "int", "bool") or part.startswith("list") or part[:1].isupper()


def _sentence(message: str) -> str:
    return message[:1].lower() + message[1:].removesuffix(".")
