"""How errors are written and streams end: for clients of OpenAI's API, and of Anthropic's."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from gateway_svc.http.errors import HttpError

INTERNAL_ERROR: Final = HttpError(
    500,
    {"error": {"message": "internal error", "type": "server_error", "param": None, "code": None}},
    {},
)
_MESSAGES: Final = "/v1/messages"
_PRINTABLE: Final = re.compile(r"[\x21-\x7e]+")
# Anthropic's types of errors, where they differ from the others.
_TYPES: Final = {
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}
# By code, how the message begins in Anthropic's API: clients recognise errors by it.
_BEGINNINGS: Final = {"context_length_exceeded": "prompt is too long: "}
# By field and code, what clients act on: their tool runners ask for a conversation that the server
# keeps, and continue without one.
_DETAILS: Final = {
    ("thread", "unsupported_field"): {"error_code": "thread_unsupported_request"},
}


@dataclass(frozen=True)
class Dialect:
    """What clients of one API expect beside the output itself."""

    # The body of an error, from that of OpenAI's API.
    error_body: Callable[[HttpError], dict[str, Any]]
    # The name of the event of an error; None: it has none.
    error_event: str | None
    # Whether a stream ends with `[DONE]`.
    has_done: bool
    # Headers with the id of the request.
    id_names: tuple[str, ...]

    def id_headers(self, request_id: str) -> dict[str, str]:
        """Headers with the id; none if it cannot be in a header, as it is refused elsewhere."""
        return dict.fromkeys(self.id_names, request_id) if _PRINTABLE.fullmatch(request_id) else {}


def _anthropic_error(error: HttpError) -> dict[str, Any]:
    inner = error.body["error"]
    kind = "api_error" if inner["type"] == "server_error" else inner["type"]
    kind = _TYPES.get(error.status, kind)
    body = {"type": kind, "message": _BEGINNINGS.get(inner["code"], "") + inner["message"]}
    if (details := _DETAILS.get((inner["param"], inner["code"]))) is not None:
        body["details"] = details
    return {"type": "error", "error": body}


OPENAI: Final = Dialect(lambda error: error.body, None, True, ("x-request-id",))
ANTHROPIC: Final = Dialect(_anthropic_error, "error", False, ("x-request-id", "request-id"))


def dialect_of(path: str) -> Dialect:
    """The dialect of a request's path."""
    is_message = path == _MESSAGES or path.startswith(f"{_MESSAGES}/")
    return ANTHROPIC if is_message else OPENAI
