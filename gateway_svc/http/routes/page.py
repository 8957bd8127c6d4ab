"""The gateway's page: static files, and the state of the service."""

from importlib import resources
from typing import Any

from fastapi import APIRouter, HTTPException, Request, Response

from gateway_svc.http.context import RequestContext
from gateway_svc.http.routes.read_route import ReadRoute
from gateway_svc.http.service_status import ServiceStatus

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
}
# Scripts and styles of this gateway alone; nothing of the page's is ever sent elsewhere.
_HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:",
    "cache-control": "no-cache",
}


class PageRoutes:
    def __init__(self, context: RequestContext, status: ServiceStatus) -> None:
        self._context = context
        self._status = status
        folder = resources.files("gateway_svc.http") / "page"
        self._files = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}

    def router(self) -> APIRouter:
        router = APIRouter(include_in_schema=False, route_class=ReadRoute)
        router.get("/")(self.index)
        router.get("/page/{name}")(self.file)
        router.get("/status")(self.status)
        return router

    async def index(self) -> Response:
        return await self.file("index.html")

    async def file(self, name: str) -> Response:
        content = self._files.get(name)
        if content is None:
            raise HTTPException(404)
        return Response(content, media_type=_TYPES[name.rpartition(".")[2]], headers=_HEADERS)

    async def status(self, request: Request) -> dict[str, Any]:
        """Return what `quire status` shows, at most a second old."""
        self._context.check_admin(request)
        return await self._status.get()
