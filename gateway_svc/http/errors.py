"""Converts errors to OpenAI's JSON: message, type, param and code."""

import re
from dataclasses import dataclass
from typing import Any

import grpc
from google.rpc import error_details_pb2

from gateway_svc.http.bodies.reading import CONTENT_ENCODING
from gateway_svc.http.bodies.structured import FORMAT_NAMES
from gateway_svc.scheduler.events import EndedError
from quire.internal.v1 import gateway_pb2
from quire.service.errors import RequestError

# Reasons of errors that gRPC does not have: of a body that does not arrive, or is compressed.
BODY_TIMEOUT = "BODY_TIMEOUT"
_REASON_STATUSES = {BODY_TIMEOUT: 408, CONTENT_ENCODING: 415}
# gRPC's own mapping (google/rpc/code.proto), where it has one.
_STATUSES = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.ABORTED: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.CANCELLED: 499,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
# OpenAI's clients repeat a request after 409, 429 and 5xx, unless a header forbids it. After these
# reasons it can only fail again, and one that crashes workers would crash as many again.
_FINAL_REASONS = frozenset({"POISON", "REQUEST_ID_TAKEN", "TAKEN_OVER"})
# Codes of OpenAI's API, for errors that it has too.
_CODES = {
    "PROMPT_TOO_LONG": "context_length_exceeded",
    "UNKNOWN_MODEL": "model_not_found",
    "UNKNOWN_KEY": "invalid_api_key",
}
# Fields of the gRPC API, as `invalid` names them, and what precedes them.
_INDEX = re.compile(r"\[\d+\]")
_PREFIX = re.compile(r"^(sampling_params|conversation|params)\.")


# Names of chats: the fields of tools and calls are those of an object within.
CHAT_NAMES = {
    "conversation": "messages",
    "tools[]": "function",
    "tool_choice.name": "tool_choice.function.name",
    **{
        f"messages[].tool_calls[].{name}": f"messages[].tool_calls[].function.{name}"
        for name in ("name", "arguments")
    },
}


@dataclass(frozen=True)
class HttpError:
    """An error as the HTTP API reports it."""

    status: int
    body: dict[str, Any]
    # For clients that repeat requests.
    headers: dict[str, str]
    # Whether the request has ended with it. Otherwise it may run on, as when it is taken over.
    has_ended: bool = False


def to_http(error: RequestError, renamed: dict[str, str] | None = None) -> HttpError:
    """Convert an error. `renamed` has the client's names of fields that have others in gRPC; for
    `field[]`, the name of the object within each of its entries that has the fields. A longer path
    with `[]` stands for any indices."""
    reason = error.info.reason
    status = _REASON_STATUSES.get(reason, _STATUSES.get(error.code, 500))
    message, param = error.message, None
    request = error.detail(error_details_pb2.BadRequest)
    if request is not None and request.field_violations:
        field = request.field_violations[0].field
        param = _param(field, renamed or {})
        message = param + message.removeprefix(field)
    body = {
        "message": message,
        "type": _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error"),
        "param": param,
        "code": _CODES.get(reason, reason.lower()) or None,
    }
    has_ended = isinstance(error, EndedError)
    return HttpError(status, {"error": body}, _retry_headers(error, reason), has_ended)


def _retry_headers(error: RequestError, reason: str) -> dict[str, str]:
    """When to repeat the request, in whole seconds, or that a client should not."""
    if reason in _FINAL_REASONS:
        return {"x-should-retry": "false"}
    retry = error.detail(error_details_pb2.RetryInfo)
    if retry is None:
        return {}
    retry_after_s = max(1, round(retry.retry_delay.ToTimedelta().total_seconds()))
    return {"retry-after": str(retry_after_s)}


def format_names(error: RequestError) -> dict[str, str]:
    """The client's names of the fields of a format, as stored with the request that has ended with
    the error."""
    if not isinstance(error, EndedError):
        return {}
    state = gateway_pb2.ResumeState.FromString(error.opaque)
    return FORMAT_NAMES.get(state.http.format_field, {})


def _param(field: str, renamed: dict[str, str]) -> str:
    """The client's name of a field: that of the longest renamed path that it begins with."""
    name = _PREFIX.sub("", field).replace("token_ids.ids", "token_ids", 1)
    path = _INDEX.sub("[]", name)
    if "." in path and "[]" in path and path in renamed:
        return _with_indices(renamed[path], name)
    head = re.split(r"[.\[]", name, maxsplit=1)[0]
    if (inner := renamed.get(f"{head}[]")) is not None:
        name = re.sub(r"^(\w+\[\d+\])\.", rf"\1.{inner}.", name)
    ends = [match.start() for match in re.finditer(r"[.\[]", name)] + [len(name)]
    found = next((end for end in reversed(ends) if name[:end] in renamed), None)
    return name if found is None else renamed[name[:found]] + name[found:]


def _with_indices(path: str, name: str) -> str:
    """A path with the indices of a name of as many."""
    indices = iter(_INDEX.findall(name))
    return re.sub(r"\[\]", lambda _: next(indices), path)
