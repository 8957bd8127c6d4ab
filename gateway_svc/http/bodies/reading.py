"""Reads and checks the bodies of requests without blocking the event loop."""

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import NoReturn, TypeVar

import grpc
import orjson
from fastapi import Request
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from gateway_svc.http.bodies.field_errors import FieldFailure
from gateway_svc.http.bodies.fields import HttpRequest
from quire.service.errors import RequestError, failed, invalid

R = TypeVar("R", bound=HttpRequest)
T = TypeVar("T")

# Larger ones are parsed in a thread.
_INLINE_BYTES = 2**15
# The reason of an error of a body that is compressed.
CONTENT_ENCODING = "CONTENT_ENCODING"


async def read_body(
    request: Request, kind: type[R], max_bytes: int, convert: Callable[[R], T]
) -> tuple[R, T]:
    """Read a body of at most `max_bytes` as JSON of the given type, and convert it to what the
    services take, which needs a second for eight megabytes of small values. RequestError names the
    field that is invalid."""
    _check_encoding(request.headers.getlist("content-encoding"))
    try:
        data = await _read(request, max_bytes)
    except ClientDisconnect:
        # The response is written to no client; traces have its status.
        raise failed(
            grpc.StatusCode.CANCELLED, "CLIENT_DISCONNECTED", "the client has disconnected"
        ) from None

    def work() -> tuple[R, T]:
        body = _parse(data, kind)
        return body, convert(body)

    return work() if len(data) <= _INLINE_BYTES else await asyncio.to_thread(work)


def _check_encoding(headers: list[str]) -> None:
    for encoding in ",".join(headers).split(","):
        if encoding.strip().lower() not in ("", "identity"):
            raise invalid(
                "Content-Encoding",
                CONTENT_ENCODING,
                f"is {encoding.strip()!r:.40}; send the body without an encoding",
            )


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
        message = _not_utf8(data) or f"the body cannot be read as JSON: {error}"
        malformed = failed(grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_JSON", message)
        raise _exact_error(data, kind) or malformed from error
    if not isinstance(value, dict):
        raise invalid("body", "INVALID_FIELD", "must be a JSON object")
    result = _validate(value, kind)
    if isinstance(result, FieldFailure):
        exact = _exact_error(data, kind) if result.is_large_number else None
        raise exact or result.request_error()
    return result


def _exact_error(data: bytes, kind: type[R]) -> RequestError | None:
    """The error of a field whose value orjson refuses or rounds, and Python's parser reads: a
    number beyond 64 bits or a double's range, or half of a surrogate pair. None if there is none.
    """
    with contextlib.suppress(ValueError, RecursionError):
        result = _validate(json.loads(data, parse_constant=_refuse), kind)
        if isinstance(result, FieldFailure):
            return result.request_error()
    return None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _validate(value: object, kind: type[R]) -> R | FieldFailure:
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        return FieldFailure.of(error, value)


def _not_utf8(data: bytes) -> str:
    """What a body in another encoding is; empty for UTF-8."""
    encoding = json.detect_encoding(data)
    if not encoding.startswith("utf-8"):
        return f"the body is {encoding.upper()}; send UTF-8"
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return f"the body is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}"
    return ""
