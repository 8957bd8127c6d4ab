"""Fields by which errors of a request name it.

The scheduler has one field for every prompt, and calls it `prompt` in its errors.
"""

from google.rpc import error_details_pb2

from gateway_svc.generation.validation import PROMPT_FIELDS, GenerationRequest
from quire.service.errors import RequestError, invalid

_SCHEDULERS_NAME = "prompt"


def prompt_field(request: GenerationRequest) -> str:
    """The field of a validated request."""
    return PROMPT_FIELDS[request.WhichOneof("prompt") or "text"]


def with_prompt_field(error: RequestError, field: str | None) -> RequestError:
    """The scheduler's error as the client gets it: with the client's own field, or without a
    violation if its request, such as one to resume, has no prompt."""
    violation = _violation(error)
    if violation is None or violation.field != _SCHEDULERS_NAME:
        return error
    named = invalid(field or _SCHEDULERS_NAME, violation.reason, violation.description)
    return named if field else without_field(named)


def renamed_field(error: RequestError, prefix: str, replacement: str) -> RequestError:
    """The error with another beginning of the field's name, if it has this one."""
    violation = _violation(error)
    if violation is None or not violation.field.startswith(prefix):
        return error
    field = replacement + violation.field.removeprefix(prefix)
    return invalid(field, violation.reason, violation.description)


def without_field(error: RequestError) -> RequestError:
    """The error of a request as a call gets it that has none of its fields."""
    details = [
        detail
        for detail in error.packed_details()
        if not detail.Is(error_details_pb2.BadRequest.DESCRIPTOR)
    ]
    return RequestError(error.code, error.message, tuple(details))


def _violation(error: RequestError) -> error_details_pb2.BadRequest.FieldViolation | None:
    """The field that the error names, and why it is invalid."""
    request = error.detail(error_details_pb2.BadRequest)
    if request is None or not request.field_violations:
        return None
    [violation] = request.field_violations
    return violation
