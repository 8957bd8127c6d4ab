"""Server interceptor: parses requests, converts errors to statuses and counts live calls."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeAlias

import grpc
import structlog
from google.protobuf.message import DecodeError

from gateway_svc.admission.live_limits import LiveLimits
from gateway_svc.admission.request_size import RequestSize
from quire.service.errors import RequestError, abort, failed

log = structlog.get_logger()

Context = grpc.aio.ServicerContext[Any, Any]
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"
# Any: gRPC's handler types cover only the methods of a synchronous server.
_Method = Callable[[Any, Context], Awaitable[Any]]


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Applies to coroutine methods that take one request.

    A request that cannot be parsed ends with INVALID_ARGUMENT. gRPC's own status would be UNKNOWN,
    with the name of a Python class.
    """

    def __init__(
        self,
        services: Iterable[str],
        live_limits: LiveLimits,
        request_size: Callable[[], RequestSize],
    ) -> None:
        """Calls of `services` are counted and limited, and their errors become statuses. Health
        checks are excluded: a watch does not end by itself. All requests are limited in size.
        """
        self.num_live = 0
        self._live_limits = live_limits
        self._request_size = request_size
        self._idle = asyncio.Event()
        self._idle.set()
        self._prefixes = tuple(f"/{service}/" for service in services)
        # By method; the methods of a server do not change.
        self._handlers: dict[str, _Handler] = {}

    async def wait_until_idle(self) -> None:
        """Wait until no call of `services` is live."""
        await self._idle.wait()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler:
        name = handler_call_details.method
        if (cached := self._handlers.get(name)) is not None:
            return cached
        handler = await continuation(handler_call_details)
        # Unknown methods are not cached: their number is unbounded.
        if handler is None or handler.request_streaming:
            return handler
        self._handlers[name] = self._wrap(handler, name.startswith(self._prefixes))
        return self._handlers[name]

    def _wrap(self, handler: Any, is_counted: bool) -> _Handler:
        if handler.response_streaming:
            method, create = handler.unary_stream, grpc.unary_stream_rpc_method_handler
        else:
            method, create = handler.unary_unary, grpc.unary_unary_rpc_method_handler
        method = self._parsed(handler.request_deserializer, method)
        if is_counted:
            method = self._counted(method)
        # Without a deserializer gRPC passes the bytes to the method.
        return create(method, response_serializer=handler.response_serializer)

    def _counted(self, method: _Method) -> _Method:
        async def call(data: bytes, context: Context) -> Any:
            self.num_live += 1
            self._idle.clear()
            try:
                with self._live_limits.hold(len(data)):
                    return await method(data, context)
            except RequestError as error:
                await abort(context, error)
            except grpc.aio.AbortError:
                raise
            except Exception:
                log.exception("a call failed unexpectedly")
                await context.abort(grpc.StatusCode.INTERNAL, "internal error")
            finally:
                self.num_live -= 1
                if not self.num_live:
                    self._idle.set()

        return call

    def _parsed(self, parse: Callable[[bytes], Any], method: _Method) -> _Method:
        # The class of which `parse` is a method.
        descriptor = parse.__self__.DESCRIPTOR  # type: ignore[attr-defined]

        async def call(data: bytes, context: Context) -> Any:
            try:
                self._request_size().check(data, descriptor)
                request = parse(data)
            except RequestError as error:
                await abort(context, error)
            except DecodeError:
                await abort(context, _malformed())
            return await method(request, context)

        return call


def _malformed() -> RequestError:
    return failed(
        grpc.StatusCode.INVALID_ARGUMENT,
        "MALFORMED_REQUEST",
        "the request cannot be parsed as the method's request type",
    )
