"""Errors as gRPC statuses with `google.rpc` details: the field, the reason, what to do."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NoReturn, Self, TypeVar

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

DetailT = TypeVar("DetailT", bound=Message)

DOMAIN = "quire"
# Limit of each text in an error. A status is sent in HTTP/2 headers, where gRPC guarantees 8 KiB
# and percent-encoding triples a text: message and details together stay below that.
MAX_TEXT_BYTES = 1024
_MAX_DETAILS_BYTES = 2048
_CODES = {code.value[0]: code for code in grpc.StatusCode}


@dataclass(eq=False)
class RequestError(Exception):
    """The status with which a request fails. Raised anywhere; the servicer aborts the call with it.

    A message longer than MAX_TEXT_BYTES is truncated.
    """

    code: grpc.StatusCode
    message: str
    details: tuple[Message, ...] = field(default=())

    def __post_init__(self) -> None:
        self.message = _truncate(self.message)

    def __str__(self) -> str:
        return self.message

    @classmethod
    def from_status(cls, status: status_pb2.Status) -> Self:
        """The error that another service returned; an invalid code becomes UNKNOWN."""
        code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
        return cls(code, status.message, tuple(status.details))

    def to_status(self) -> status_pb2.Status:
        return status_pb2.Status(
            code=self.code.value[0], message=self.message, details=self.packed_details()
        )

    def packed_details(self) -> list[any_pb2.Any]:
        """All details, or none if together they are too large for a status."""
        packed = [_packed(detail) for detail in self.details]
        fits = sum(detail.ByteSize() for detail in packed) <= _MAX_DETAILS_BYTES
        return packed if fits else []

    def detail(self, kind: type[DetailT]) -> DetailT | None:
        """The first detail of a type that its status has; None if there is none."""
        found = kind()
        return next((found for packed in self.packed_details() if packed.Unpack(found)), None)

    @property
    def info(self) -> error_details_pb2.ErrorInfo:
        """Its ErrorInfo; an empty one if it has none."""
        return self.detail(error_details_pb2.ErrorInfo) or error_details_pb2.ErrorInfo()


def _packed(detail: Message) -> any_pb2.Any:
    """Pack a detail; one that another service packed is forwarded unchanged."""
    if isinstance(detail, any_pb2.Any):
        return detail
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed


def _truncate(text: str) -> str:
    """Truncate at a character; a lone surrogate becomes a question mark."""
    data = text.encode(errors="replace")
    if len(data) <= MAX_TEXT_BYTES:
        return data.decode()
    return data[: MAX_TEXT_BYTES - len("...")].decode(errors="ignore") + "..."


def invalid(field_name: str, reason: str, description: str) -> RequestError:
    """INVALID_ARGUMENT: `field_name` as in the request's proto, `reason` in UPPER_SNAKE_CASE."""
    description = _truncate(description)
    violation = error_details_pb2.BadRequest.FieldViolation(
        field=field_name, description=description, reason=reason
    )
    return RequestError(
        grpc.StatusCode.INVALID_ARGUMENT,
        f"{field_name}: {description}",
        (
            error_details_pb2.BadRequest(field_violations=[violation]),
            error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN),
        ),
    )


def failed(
    code: grpc.StatusCode,
    reason: str,
    message: str,
    retry_after_s: float | None = None,
    metadata: Mapping[str, str] | None = None,
) -> RequestError:
    """Any other status: `reason` in UPPER_SNAKE_CASE, `retry_after_s` if a retry can succeed,
    `metadata` for the ErrorInfo."""
    info = error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=metadata)
    details: list[Message] = [info]
    if retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(retry_after_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    return RequestError(code, message, tuple(details))


def unavailable(
    reason: str,
    message: str,
    retry_after_s: float = 1.0,
    metadata: Mapping[str, str] | None = None,
) -> RequestError:
    """UNAVAILABLE, with the time after which a retry can succeed."""
    return failed(grpc.StatusCode.UNAVAILABLE, reason, message, retry_after_s, metadata)


async def abort(context: grpc.aio.ServicerContext, error: RequestError) -> NoReturn:  # type: ignore[type-arg]
    """Abort a call with the error's status and details. CancelledError if the client has gone."""
    rich = rpc_status.to_status(error.to_status())
    try:
        await context.abort(rich.code, rich.details, rich.trailing_metadata)
    except grpc.aio.InternalError:
        # The status cannot be sent any more, and gRPC ends cancelled calls without a word.
        raise asyncio.CancelledError from None
    raise AssertionError("abort returned")
