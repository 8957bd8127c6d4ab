"""Server interceptor: authenticates and counts calls, parses requests, converts errors."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeAlias

import grpc
import structlog
from google.protobuf.message import DecodeError

from gateway_svc.access.authentication import Authentication
from gateway_svc.access.tenant import Tenant
from gateway_svc.admission.live_limits import LiveLimits
from gateway_svc.admission.request_size import RequestSize
from gateway_svc.tracing.call_trace import CallTrace, CallTracing
from quire.service.api_keys import HEADER
from quire.service.errors import RequestError, abort, failed

log = structlog.get_logger()

Context = grpc.aio.ServicerContext[Any, Any]
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"
# Any: gRPC's handler types cover only the methods of a synchronous server.
_Method = Callable[[Any, Context], Awaitable[Any]]
_Metadata: TypeAlias = "Iterable[tuple[str, str | bytes]] | None"
_REFLECTION = "/grpc.reflection."
# Services whose calls are traced: those of generations.
_TRACED = ("/quire.v1.InferenceService/", "/quire.v1.BeamSearchService/")
# Statuses that are a server's fault, as OpenTelemetry has it.
_FAULTS = {
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DATA_LOSS,
}


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Applies to coroutine methods that take one request.

    A request that cannot be parsed ends with INVALID_ARGUMENT. gRPC's own status would be UNKNOWN,
    with the name of a Python class.
    """

    def __init__(
        self,
        services: Iterable[str],
        authentication: Authentication,
        live_limits: LiveLimits,
        request_size: Callable[[], RequestSize],
        tracing: CallTracing,
    ) -> None:
        """Calls of `services` are authenticated, counted and limited, and their errors become
        statuses. Health checks are excluded: they need no key, and a watch does not end by itself.
        Reflection is only authenticated, as an administrator. All requests are limited in size.
        """
        self.num_live = 0
        self._authentication = authentication
        self._live_limits = live_limits
        self._request_size = request_size
        self._tracing = tracing
        # Of live calls.
        self._tenants: dict[Context, Tenant] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._prefixes = tuple(f"/{service}/" for service in services)
        # By method; the methods of a server do not change.
        self._handlers: dict[str, _Handler] = {}

    async def wait_until_idle(self) -> None:
        """Wait until no call of `services` is live."""
        await self._idle.wait()

    def tenant_of(self, context: Context) -> Tenant:
        """The tenant of a live call."""
        return self._tenants[context]

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler:
        name = handler_call_details.method
        if error := self._access_error(handler_call_details):
            return _refusing(error)
        if (cached := self._handlers.get(name)) is not None:
            return cached
        handler = await continuation(handler_call_details)
        # Unknown methods are not cached: their number is unbounded.
        if handler is None or handler.request_streaming:
            return handler
        self._handlers[name] = self._wrap(handler, name)
        return self._handlers[name]

    def _wrap(self, handler: Any, name: str) -> _Handler:
        is_counted = name.startswith(self._prefixes)
        if handler.response_streaming:
            method, create = handler.unary_stream, grpc.unary_stream_rpc_method_handler
        else:
            method, create = handler.unary_unary, grpc.unary_unary_rpc_method_handler
        method = self._parsed(handler.request_deserializer, method)
        if is_counted:
            method = self._counted(method)
        if name.startswith(_TRACED):
            method = self._traced(name, method)
        # Without a deserializer gRPC passes the bytes to the method.
        return create(
            self._authenticated(method) if is_counted else method,
            response_serializer=handler.response_serializer,
        )

    def _access_error(self, details: grpc.HandlerCallDetails) -> RequestError | None:
        """The error of a call without access, before its message is read."""
        try:
            if details.method.startswith(_REFLECTION):
                self._authentication.authenticate_admin(_header(details.invocation_metadata))
            elif details.method.startswith(self._prefixes):
                self._authentication.authenticate(_header(details.invocation_metadata))
        except RequestError as error:
            return error
        return None

    def _authenticated(self, method: _Method) -> _Method:
        async def call(data: bytes, context: Context) -> Any:
            # Again, because only a context is passed from the interception to the method.
            try:
                tenant = self._authentication.authenticate(_header(context.invocation_metadata()))
            except RequestError as error:
                await abort(context, error)
            self._tenants[context] = tenant
            try:
                return await method(data, context)
            finally:
                del self._tenants[context]

        return call

    def _counted(self, method: _Method) -> _Method:
        async def call(data: bytes, context: Context) -> Any:
            self.num_live += 1
            self._idle.clear()
            try:
                with self._live_limits.hold(len(data), self._tenants[context].principal):
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

    def _traced(self, name: str, method: _Method) -> _Method:
        async def call(data: bytes, context: Context) -> Any:
            headers = {
                name: value
                for name, value in context.invocation_metadata() or ()
                if isinstance(value, str)
            }
            with self._tracing.call(name[1:], headers) as trace:
                if trace is None or not trace.is_recorded:
                    return await method(data, context)
                trace.set({"rpc.system.name": "grpc", "rpc.method": name[1:]})
                code = grpc.StatusCode.CANCELLED
                try:
                    result = await method(data, context)
                    code = grpc.StatusCode.OK
                except grpc.aio.AbortError:
                    code = _code_of(context)
                    raise
                finally:
                    _set_status(trace, code)
                return result

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


def _code_of(context: Context) -> grpc.StatusCode:
    """The status that a call was aborted with."""
    code: Any = context.code()
    return code if isinstance(code, grpc.StatusCode) else grpc.StatusCode.UNKNOWN


def _set_status(trace: CallTrace, code: grpc.StatusCode) -> None:
    trace.set({"rpc.response.status_code": code.name})
    if code in _FAULTS:
        trace.set({"error.type": code.name})
        trace.error = f"gRPC status {code.name}"


def _header(metadata: _Metadata) -> str | bytes | None:
    """The value of the header `authorization`; None unless there is exactly one."""
    values = [value for name, value in metadata or () if name == HEADER]
    return values[0] if len(values) == 1 else None


def _refusing(error: RequestError) -> _Handler:
    """A handler of streaming calls that ends them with an error."""

    async def call(requests: Any, context: Context) -> None:
        await abort(context, error)

    return grpc.stream_stream_rpc_method_handler(call)
