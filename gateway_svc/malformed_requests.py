"""Bytes that are no request, answered in gRPC's terms."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from gateway_svc.rpc import Context
from quire.service.errors import abort, failed

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"


class MalformedRequests(grpc.aio.ServerInterceptor):
    """INVALID_ARGUMENT for them, where gRPC says UNKNOWN and names a Python class.

    For methods that take one request, and are coroutines.
    """

    def __init__(self) -> None:
        # By method: what is served does not change.
        self._handlers: dict[str, _Handler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler:
        method = handler_call_details.method
        if (known := self._handlers.get(method)) is not None:
            return known
        handler = _checking(await continuation(handler_call_details))
        # There is none for a method that nobody serves, of which there are any number.
        if handler is not None:
            self._handlers[method] = handler
        return handler


def _checking(handler: _Handler) -> _Handler:
    if handler is None or handler.request_streaming:
        return handler
    # Without a deserializer a method is given the bytes.
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(
            _parsing(handler.request_deserializer, handler.unary_stream),
            response_serializer=handler.response_serializer,
        )
    return grpc.unary_unary_rpc_method_handler(
        _parsing(handler.request_deserializer, handler.unary_unary),
        response_serializer=handler.response_serializer,
    )


# Any: gRPC's types of handlers know only the methods of a synchronous server.
def _parsing(parse: Any, method: Any) -> Callable[[bytes, Context], Awaitable[Any]]:
    async def parse_and_answer(data: bytes, context: Context) -> Any:
        try:
            request = parse(data)
        except DecodeError:
            await abort(context, _MALFORMED)
        return await method(request, context)

    return parse_and_answer


_MALFORMED = failed(
    grpc.StatusCode.INVALID_ARGUMENT,
    "MALFORMED_REQUEST",
    "the bytes are no message of the method's request type",
)
