"""An ASGI application around the gateway's that opens the traces of requests."""

from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway_svc.tracing.call_trace import CallTrace, CallTracing

# Paths of generations, and one beside them that clients poll.
_PREFIX: Final = "/v1/"
_UNTRACED: Final = "/v1/models"


class TracedApp:
    """Traces requests that concern generations, refused ones included."""

    def __init__(self, app: ASGIApp, tracing: CallTracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _is_traced(scope["path"]):
            await self._app(scope, receive, send)
            return
        with self._tracing.call(scope["method"], Headers(scope=scope)) as trace:
            if trace is None or not trace.is_recorded:
                await self._app(scope, receive, send)
                return
            try:
                await self._app(scope, receive, _noting_status(send, trace))
            finally:
                _describe(trace, scope)


def _is_traced(path: str) -> bool:
    return path.startswith(_PREFIX) and not path.startswith(_UNTRACED)


def _noting_status(send: Send, trace: CallTrace) -> Send:
    async def noting(message: Message) -> None:
        if message["type"] == "http.response.start":
            status = message["status"]
            trace.set({"http.response.status_code": status})
            if status >= 500:
                trace.set({"error.type": str(status)})
                trace.error = f"HTTP status {status}"
        await send(message)

    return noting


def _describe(trace: CallTrace, scope: Scope) -> None:
    """Name the span by its route, which is known once the application has found it."""
    route = getattr(scope.get("route"), "path_format", None)
    if route is not None:
        trace.name = f"{scope['method']} {route}"
    trace.set(
        {
            "http.request.method": scope["method"],
            "http.route": route,
            "url.path": scope["path"],
            "url.scheme": scope.get("scheme"),
        }
    )
