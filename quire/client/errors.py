"""The exceptions of the client library, made from gRPC statuses."""

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

# The reason of a request that no service has any more.
UNKNOWN_REQUEST = "UNKNOWN_REQUEST"
_STATUS_DETAILS_KEY = "grpc-status-details-bin"
_Detail = TypeVar("_Detail", bound=Message)


class QuireError(Exception):
    """A call ended with a status other than OK."""

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        field: str | None = None,
        reason: str | None = None,
        retry_after_s: float | None = None,
        resumable: bool = False,
        leader: str | None = None,
    ) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message
        # The invalid field of the request.
        self.field = field
        # UPPER_SNAKE_CASE, for programs; None if the error is not the server's.
        self.reason = reason
        # Seconds after which a retry can succeed.
        self.retry_after_s = retry_after_s
        # The request can continue: a stream by `resume`, others by a retry with the same id. The
        # client has already retried for its `resume_timeout_s`.
        self.resumable = resumable
        # An earlier attempt of the same call has failed, and may have been carried out.
        self.repeated = False
        # The scheduler that leads, if a standby has named it.
        self.leader = leader

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy by the attributes. Python's own way passes `args`, which has only the
        text; a pool of processes would then break at the first failure of a call."""
        return _without_init, (type(self), *self.args), vars(self)


def _without_init(kind: type[QuireError], text: str) -> QuireError:
    return kind.__new__(kind, text)


class InvalidArgumentError(QuireError):
    """An argument is invalid; `field` names it."""


class UnauthenticatedError(QuireError):
    """The API key is missing or unknown."""


class NotFoundError(QuireError):
    """There is no such model or request."""


class AlreadyExistsError(QuireError):
    """The request id belongs to another request."""


class ResourceExhaustedError(QuireError):
    """A limit is reached; `retry_after_s` is the time to wait."""


class UnavailableError(QuireError):
    """No server is available."""


class DeadlineExceededError(QuireError):
    """The call's deadline has passed."""


class CancelledError(QuireError):
    """The request was cancelled by its id, or its resume window has passed."""


_CLASSES: Mapping[grpc.StatusCode, type[QuireError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgumentError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExistsError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhaustedError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.CANCELLED: CancelledError,
}

# The server responds with the text `HTTP/1.1`, whose fourth byte is in the place of a frame's type.
_HTTP_1 = "Expected SETTINGS frame as the first frame, got frame type 80"
# Over TLS, a server that does not know HTTP/2.
_NO_ALPN = "missing selected ALPN property"
# What gRPC says of a connection that no retry can make.
_FINAL_FAILURES: Mapping[str, str] = {
    "CERTIFICATE_VERIFY_FAILED": "no trusted certificate",
    "Hostname Verification Check failed": "no certificate for this name",
    "WRONG_VERSION_NUMBER": "no server with TLS",
    _HTTP_1: "a server of HTTP/1, and none of gRPC,",
    _NO_ALPN: "a server of HTTP/1, and none of gRPC,",
}
_HTTP_1_HINT = "; use the address for gRPC, by default port 50051, not that of the HTTP API"
_AUTHORITY_HINT = "; name the file of its authority: --tls-ca, or TLS(ca=...) in Python"
# What to do, by what gRPC says.
_HINTS: Mapping[str, str] = {
    "unable to get local issuer certificate": _AUTHORITY_HINT,
    "self signed certificate": _AUTHORITY_HINT,
    _HTTP_1: _HTTP_1_HINT,
    _NO_ALPN: _HTTP_1_HINT,
    "Socket closed)": "; a server with TLS closes connections without it or without a certificate",
}

# What gRPC's core says of a message that it refuses, on either side.
_TOO_LARGE = re.compile(
    r"(CLIENT|SERVER): (Sent|Received) message larger than max \((\d+) vs\. (\d+)\)"
)
_REQUEST_SIDES = {("CLIENT", "Sent"), ("SERVER", "Received")}


@contextmanager
def ignore_repeated_cancel() -> Iterator[None]:
    """Suppress that the request of a cancellation is unknown if an earlier attempt may have ended
    it."""
    try:
        yield
    except NotFoundError as error:
        if not error.repeated or error.reason != UNKNOWN_REQUEST:
            raise


@contextmanager
def translate_errors(target: str) -> Iterator[None]:
    """Translate gRPC's errors into QuireError."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_status(cast(grpc.Call, error), target) from error


@contextmanager
def translate_aio_errors(target: str, is_closed: Callable[[], bool]) -> Iterator[None]:
    """As `translate_errors`. gRPC ends the calls of a closed client as if their tasks had been
    cancelled, which a group of tasks passes over: a result would be missing without an error."""
    try:
        with translate_errors(target):
            yield
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if not is_closed() or (task is not None and task.cancelling()):
            raise
        raise CancelledError(grpc.StatusCode.CANCELLED, "the client is closed") from None


def from_status(call: grpc.Call, target: str) -> QuireError:
    """The error of an ended call, with its `google.rpc` details."""
    status = _status(call)
    bad_request = _detail(status, error_details_pb2.BadRequest())
    info = _detail(status, error_details_pb2.ErrorInfo())
    retry = _detail(status, error_details_pb2.RetryInfo())
    message = call.details() or "no details"
    resumable = _is_resumable(call.code(), info)
    if call.code() is grpc.StatusCode.UNAVAILABLE and info is None:
        mark = next((one for one in _FINAL_FAILURES if one in message), None)
        resumable = mark is None
        what = "no server responds" if mark is None else _FINAL_FAILURES[mark]
        message = f"{what} at {target} ({message})"
        message += next((hint for said, hint in _HINTS.items() if said in message), "")
    if call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and info is None:
        message = _size_message(message)
    return _CLASSES.get(call.code(), QuireError)(
        call.code(),
        message,
        field=bad_request.field_violations[0].field if bad_request else None,
        reason=info.reason if info else None,
        retry_after_s=retry.retry_delay.ToMilliseconds() / 1000 if retry else None,
        resumable=resumable,
        leader=info.metadata.get("leader") if info else None,
    )


def _size_message(message: str) -> str:
    """What gRPC's core means by its text for a message that is too large; other texts as they
    are."""
    match = _TOO_LARGE.search(message)
    if match is None:
        return message
    side, action, size, limit = match.groups()
    if (side, action) in _REQUEST_SIDES:
        what = f"the request has {size} bytes; a message may have at most {limit}"
        hint = "the limit follows from the model's context; shorten the request"
    else:
        what = f"the response has {size} bytes; a message may have at most {limit}"
        hint = "stream it, or request fewer log-probabilities or choices"
    return f"{what}: {hint} ({message})"


def _is_resumable(code: grpc.StatusCode, info: error_details_pb2.ErrorInfo | None) -> bool:
    """The server's metadata; without it, whether the connection failed. A CANCELLED without
    ErrorInfo is a reset by gRPC's core, for example of a server that stops."""
    if info is None and code is grpc.StatusCode.CANCELLED:
        return True
    resumable = info.metadata.get("resumable") if info else None
    return resumable == "true" if resumable else code is grpc.StatusCode.UNAVAILABLE


def _status(call: grpc.Call) -> status_pb2.Status:
    for key, value in call.trailing_metadata() or ():
        if key == _STATUS_DETAILS_KEY:
            return status_pb2.Status.FromString(value)
    return status_pb2.Status()


def _detail(status: status_pb2.Status, empty: _Detail) -> _Detail | None:
    """The first detail of the type of `empty`."""
    return next((empty for packed in status.details if packed.Unpack(empty)), None)
