"""Lines of batch files, in OpenAI's format."""

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError


class InvalidLine(ValueError):
    """A line that is no request. The message names the field and the reason."""

    def __init__(self, message: str, custom_id: str | None) -> None:
        super().__init__(message)
        # Of the line, if it could be read.
        self.custom_id = custom_id


class BatchRequest(BaseModel):
    """A line of the input."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    custom_id: str = Field(min_length=1)
    method: Literal["POST"]
    url: Literal["/v1/chat/completions", "/v1/completions"]
    body: dict[str, Any]


@dataclass(frozen=True)
class BatchResponse:
    """A server's response, of any status."""

    status_code: int
    request_id: str | None
    body: Any


@dataclass(frozen=True)
class BatchError:
    """Why there is no response."""

    code: str
    message: str


@dataclass(frozen=True)
class BatchOutput:
    """A line of the output: either `response` or `error` is set."""

    id: str
    custom_id: str | None
    response: BatchResponse | None = None
    error: BatchError | None = None

    @property
    def has_failed(self) -> bool:
        return self.response is None or self.response.status_code != 200

    def to_json(self) -> str:
        """One line, without its end."""
        response, error = self.response, self.error
        value = {
            "id": self.id,
            "custom_id": self.custom_id,
            "response": None if response is None else vars(response),
            "error": None if error is None else vars(error),
        }
        text = json.dumps(value, ensure_ascii=False)
        # Half of a surrogate pair can be escaped, and not be encoded.
        return text if _is_encodable(text) else json.dumps(value)


def parse_line(line: str) -> BatchRequest:
    """InvalidLine unless it is a request with one response."""
    if not _is_encodable(line):
        raise InvalidLine("no valid UTF-8", None)
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidLine(f"no valid JSON: {error}", None) from None
    given = value.get("custom_id") if isinstance(value, dict) else None
    custom_id = given if isinstance(given, str) else None
    try:
        request = BatchRequest.model_validate(value)
    except ValidationError as invalid:
        first = invalid.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the line"
        raise InvalidLine(f"{where}: {first['msg']}", custom_id) from None
    if request.body.get("stream"):
        raise InvalidLine("body.stream: must be absent or false in a batch", custom_id)
    return request


def encoded_body(request: BatchRequest) -> bytes:
    """The body to send. InvalidLine if it is nested too deeply, or has an infinite number or half
    of a surrogate pair. Made only here: how deep JSON may be depends on the depth of the calls."""
    try:
        text = json.dumps(request.body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode()
    except RecursionError:
        message = "body: is nested too deeply"
    except ValueError:
        message = "body: has a number or a character that JSON does not have"
    raise InvalidLine(message, request.custom_id)


def succeeded_lines(outputs: str) -> dict[str, str]:
    """The lines of an output whose responses have status 200, by custom_id. What follows the last
    line feed is half a line."""
    found: dict[str, str] = {}
    for line in outputs.split("\n")[:-1]:
        if (custom_id := _succeeded_id(line)) is not None:
            found.setdefault(custom_id, line)
    return found


def pending_lines(lines: Iterable[str], done: Collection[str]) -> list[str]:
    """The lines of an input without the first one of each custom_id that is done."""
    left = set(done)
    pending = []
    for line in lines:
        try:
            custom_id = parse_line(line).custom_id
        except InvalidLine:
            custom_id = ""
        if custom_id in left:
            left.remove(custom_id)
        else:
            pending.append(line)
    return pending


def _succeeded_id(line: str) -> str | None:
    """The custom_id of an output with status 200; None for other outputs and what is none."""
    try:
        value = json.loads(line)
        custom_id, status = value["custom_id"], value["response"]["status_code"]
    except (ValueError, RecursionError, LookupError, TypeError):
        return None
    is_kept = isinstance(custom_id, str) and status == 200 and _is_encodable(line)
    return custom_id if is_kept else None


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
