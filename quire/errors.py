"""What callers catch: a gRPC status as one clear exception."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar, cast

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

_STATUS_DETAILS_KEY = "grpc-status-details-bin"
_Detail = TypeVar("_Detail", bound=Message)


class QuireError(Exception):
    """A call that ended with a status other than OK."""

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        field: str | None = None,
        reason: str | None = None,
        retry_after_s: float | None = None,
        resumable: bool = False,
    ) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message
        # The request's field that was wrong.
        self.field = field
        # UPPER_SNAKE_CASE, for programs; absent where the error is not the server's own.
        self.reason = reason
        # When a retry makes sense.
        self.retry_after_s = retry_after_s
        # The request may go on: a stream by `resume`, anything by being sent again with the same
        # id. Clients have tried that for their `resume_timeout_s` when they raise it.
        self.resumable = resumable


@contextmanager
def clear_errors(target: str) -> Iterator[None]:
    """Turns what gRPC raises into QuireError."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_status(cast(grpc.Call, error), target) from error


def from_status(call: grpc.Call, target: str) -> QuireError:
    """The error of an ended call, with what its `google.rpc` details say."""
    status = _status(call)
    bad_request = _detail(status, error_details_pb2.BadRequest())
    info = _detail(status, error_details_pb2.ErrorInfo())
    retry = _detail(status, error_details_pb2.RetryInfo())
    message = call.details() or "no further word"
    if call.code() is grpc.StatusCode.UNAVAILABLE and info is None:
        message = f"no server answers at {target} ({message})"
    return QuireError(
        call.code(),
        message,
        field=bad_request.field_violations[0].field if bad_request else None,
        reason=info.reason if info else None,
        retry_after_s=retry.retry_delay.ToMilliseconds() / 1000 if retry else None,
        resumable=_is_resumable(call.code(), info),
    )


def _is_resumable(code: grpc.StatusCode, info: error_details_pb2.ErrorInfo | None) -> bool:
    """What the server says of it; if it says nothing: whether the way to the server was lost."""
    said = info.metadata.get("resumable") if info else None
    return said == "true" if said else code is grpc.StatusCode.UNAVAILABLE


def _status(call: grpc.Call) -> status_pb2.Status:
    for key, value in call.trailing_metadata() or ():
        if key == _STATUS_DETAILS_KEY:
            return status_pb2.Status.FromString(value)
    return status_pb2.Status()


def _detail(status: status_pb2.Status, empty: _Detail) -> _Detail | None:
    """The first detail of the same kind as `empty`."""
    return next((empty for packed in status.details if packed.Unpack(empty)), None)
