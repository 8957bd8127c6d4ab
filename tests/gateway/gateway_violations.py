"""Checks that violations name fields that the request's type has."""

import re
from collections.abc import Awaitable, Callable
from typing import Any

from google.protobuf.descriptor import Descriptor
from google.rpc import error_details_pb2

from gateway_svc.admission.request_size import RequestSize
from gateway_svc.rpc.call_interceptor import CallInterceptor
from quire.service.errors import RequestError

_PART = re.compile(r"(\w+)((?:\[\d+\])?)")


def unknown_part(path: str, descriptor: Descriptor) -> str | None:
    """The part of a path, such as `messages[1].role`, that is no field of its message; None if all
    are. A variable of a Struct is any name."""
    message: Descriptor | None = descriptor
    for part in path.split("."):
        match = _PART.fullmatch(part)
        field = message.fields_by_name.get(match[1]) if match and message else None
        if match is None or field is None or (match[2] and not field.is_repeated):
            return part
        if field.message_type is not None and field.message_type.name == "Struct":
            return None
        message = field.message_type
    return None


def _check(error: RequestError, descriptor: Descriptor) -> None:
    for detail in error.packed_details():
        request = error_details_pb2.BadRequest()
        if detail.Unpack(request):
            assert request.field_violations
            for violation in request.field_violations:
                assert unknown_part(violation.field, descriptor) is None, violation


class CheckedInterceptor(CallInterceptor):
    """A gateway's interceptor that checks every error before it becomes a status. A violation of an
    unknown field is logged and ends the call with INTERNAL, which no test expects."""

    def _parsed(
        self, parse: Callable[[bytes], Any], method: Callable[..., Awaitable[Any]]
    ) -> Callable[..., Awaitable[Any]]:
        descriptor = parse.__self__.DESCRIPTOR  # type: ignore[attr-defined]

        async def checked(request: Any, context: Any) -> Any:
            try:
                return await method(request, context)
            except RequestError as error:
                _check(error, descriptor)
                raise

        return super()._parsed(parse, checked)


class CheckedSize(RequestSize):
    """The limits of a request, whose errors are checked likewise."""

    def check(self, data: bytes, descriptor: Descriptor) -> None:
        try:
            super().check(data, descriptor)
        except RequestError as error:
            _check(error, descriptor)
            raise
