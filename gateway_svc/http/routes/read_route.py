"""Routes that respond to HEAD as to GET."""

from collections.abc import MutableMapping
from typing import Any

from fastapi.routing import APIRoute
from starlette.routing import Match

from gateway_svc.http.response_writer import Receive, Send


class ReadRoute(APIRoute):
    """A route of GET that takes HEAD, too; uvicorn leaves the body out. Routes that attach to a
    request are of the other kind: a HEAD would take its stream over."""

    def matches(self, scope: MutableMapping[str, Any]) -> tuple[Match, MutableMapping[str, Any]]:
        return super().matches(_as_get(scope))

    async def handle(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        await super().handle(_as_get(scope), receive, send)


def _as_get(scope: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A copy: uvicorn looks at the method of its own."""
    return {**scope, "method": "GET"} if scope.get("method") == "HEAD" else scope
