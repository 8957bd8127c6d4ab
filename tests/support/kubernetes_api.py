"""A stand-in for the part of Kubernetes' API server that has EndpointSlices: lists and watches, by
https://kubernetes.io/docs/reference/using-api/api-concepts."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from waiting import until

from scheduler_svc.kubernetes.names import ApiServer

NAMESPACE, SERVICE = "serving", "workers"
_PATH = "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"


def endpoint(*addresses: str, **conditions: bool | None) -> dict[str, Any]:
    return {"addresses": [*addresses], "conditions": conditions}


class KubernetesApi:
    """It serves one namespace over TLS, to clients that have its token."""

    def __init__(self, certificates: Path, account: Path) -> None:
        """`certificates`: as `make_certificates` makes them. `account`: an empty folder for the
        files of a pod's ServiceAccount."""
        self.certificates, self.account = certificates, account
        (self.account / "ca.crt").write_bytes((self.certificates / "ca.pem").read_bytes())
        (self.account / "namespace").write_text(f"{NAMESPACE}\n")
        self.set_token("first")
        self.url = ""
        self.slices: dict[str, dict[str, Any]] = {}
        self.version = 100
        # Changes since this version can be watched.
        self.oldest = self.version
        self.events: list[tuple[int, dict[str, Any]]] = []
        # The parameters of all requests that had the token.
        self.requests: list[dict[str, str]] = []
        # What it responds instead: a status and a body; None for what it has.
        self.instead: tuple[int, str] | None = None
        self.num_watches = 0
        self._changed = asyncio.Condition()
        self._must_end = False

    def set_token(self, token: str) -> None:
        self.token = token
        (self.account / "token").write_text(f"{token}\n")

    async def put(self, name: str, *endpoints: dict[str, Any], kind: str = "IPv4") -> None:
        """Create a slice, or replace it."""
        what = "MODIFIED" if name in self.slices else "ADDED"
        item = {"metadata": {"name": name}, "addressType": kind, "endpoints": [*endpoints] or None}
        self.slices[name] = item
        await self._note(what, item)

    async def delete(self, name: str) -> None:
        await self._note("DELETED", self.slices.pop(name))

    async def bookmark(self) -> None:
        await self._note("BOOKMARK", {"metadata": {}})

    async def forget(self) -> None:
        """Earlier changes cannot be watched any more, and no watch goes on."""
        self.version += 1
        self.oldest = self.version
        await self.end_watches()

    async def end_watches(self) -> None:
        self._must_end = True
        async with self._changed:
            self._changed.notify_all()
        await until(lambda: not self.num_watches, "the end of watches")
        self._must_end = False

    async def _note(self, what: str, item: dict[str, Any]) -> None:
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        self.events.append((self.version, {"type": what, "object": json.loads(json.dumps(item))}))
        async with self._changed:
            self._changed.notify_all()

    async def respond(self, request: Request) -> Response:
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return JSONResponse({"message": "Unauthorized"}, 401)
        assert request.path_params["namespace"] == NAMESPACE
        parameters = dict(request.query_params)
        assert parameters.pop("labelSelector") == f"kubernetes.io/service-name={SERVICE}"
        self.requests.append(parameters)
        if self.instead is not None:
            status, body = self.instead
            return Response(body, status)
        if "watch" not in parameters:
            version = {"resourceVersion": str(self.version)}
            return JSONResponse({"metadata": version, "items": [*self.slices.values()]})
        assert parameters["allowWatchBookmarks"] == "true"
        return StreamingResponse(self._watch(int(parameters["resourceVersion"])))

    async def _watch(self, since: int) -> AsyncIterator[str]:
        if since < self.oldest:
            gone = {"kind": "Status", "code": 410, "message": "too old resource version"}
            yield json.dumps({"type": "ERROR", "object": gone}) + "\n"
            return
        with self._counted():
            while True:
                for version, event in self.events:
                    if version > since:
                        since = version
                        yield json.dumps(event) + "\n"
                if self._must_end:
                    return
                async with self._changed:
                    await self._changed.wait_for(
                        lambda sent=since: self._must_end or self._last_change > sent
                    )

    @property
    def _last_change(self) -> int:
        return self.events[-1][0] if self.events else 0

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self.num_watches += 1
        try:
            yield
        finally:
            self.num_watches -= 1

    @property
    def server(self) -> ApiServer:
        return ApiServer(self.url, self.account)


@asynccontextmanager
async def serving(api: KubernetesApi) -> AsyncIterator[KubernetesApi]:
    """Serve at a free port."""
    application = Starlette(routes=[Route(_PATH, api.respond)])
    config = uvicorn.Config(
        application,
        port=0,
        ssl_certfile=api.certificates / "gateway.pem",
        ssl_keyfile=api.certificates / "gateway-key.pem",
        log_config=None,
        lifespan="off",
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    await until(lambda: server.started, "the API server")
    port = server.servers[0].sockets[0].getsockname()[1]
    api.url = f"https://localhost:{port}"
    try:
        yield api
    finally:
        await api.end_watches()
        server.should_exit = True
        await task
