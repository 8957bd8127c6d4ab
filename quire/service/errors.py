"""Errors as gRPC statuses with `google.rpc` details: the field, the reason, what to do."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NoReturn, Self

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

DOMAIN = "quire"
# Of the text that one error carries in one place. Statuses travel in HTTP/2 headers, of which gRPC
# takes 8 KiB for certain, and text triples there: everything below stays under that together.
MAX_TEXT_BYTES = 1024
_MAX_DETAILS_BYTES = 2048
_CODES = {code.value[0]: code for code in grpc.StatusCode}


@dataclass(eq=False)
class RequestError(Exception):
    """A request that ends with a status. Raised anywhere, turned into the status at the rim.

    A message beyond MAX_TEXT_BYTES is cut.
    """

    code: grpc.StatusCode
    message: str
    details: tuple[Message, ...] = field(default=())

    def __post_init__(self) -> None:
        self.message = _cut(self.message)

    def __str__(self) -> str:
        return self.message

    @classmethod
    def from_status(cls, status: status_pb2.Status) -> Self:
        """What another service said; a code that is none is UNKNOWN."""
        code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
        return cls(code, status.message, tuple(status.details))

    def to_status(self) -> status_pb2.Status:
        return status_pb2.Status(
            code=self.code.value[0], message=self.message, details=self.packed_details()
        )

    def packed_details(self) -> list[any_pb2.Any]:
        """All of them, or none where they are too large for a status."""
        packed = [_packed(detail) for detail in self.details]
        fits = sum(detail.ByteSize() for detail in packed) <= _MAX_DETAILS_BYTES
        return packed if fits else []


def _packed(detail: Message) -> any_pb2.Any:
    """Details that another service packed are passed on as they are."""
    if isinstance(detail, any_pb2.Any):
        return detail
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed


def _cut(text: str) -> str:
    """Whole characters within the limit; what no UTF-8 can hold becomes a question mark."""
    data = text.encode(errors="replace")
    if len(data) <= MAX_TEXT_BYTES:
        return data.decode()
    return data[: MAX_TEXT_BYTES - len("...")].decode(errors="ignore") + "..."


def invalid(field_name: str, reason: str, description: str) -> RequestError:
    """INVALID_ARGUMENT: `field_name` as in the request's proto, `reason` in UPPER_SNAKE_CASE."""
    description = _cut(description)
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
    """Any other status, with its reason in UPPER_SNAKE_CASE; with a time, where a retry after it
    makes sense. `metadata` goes into the ErrorInfo."""
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
    """UNAVAILABLE, with the time after which a retry makes sense."""
    return failed(grpc.StatusCode.UNAVAILABLE, reason, message, retry_after_s, metadata)


async def abort(context: grpc.aio.ServicerContext, error: RequestError) -> NoReturn:  # type: ignore[type-arg]
    """Ends a call with the error's status and details."""
    rich = rpc_status.to_status(error.to_status())
    await context.abort(rich.code, rich.details, rich.trailing_metadata)
    raise AssertionError("abort returned")
