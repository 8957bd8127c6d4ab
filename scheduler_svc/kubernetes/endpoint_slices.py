"""Watches the EndpointSlices of a Service: each change of its pods arrives once, and at once.

With DNS all addresses are asked for every second, and a change is seen when caches have expired.
The protocol is a list, and then a stream of the changes since the list's version: *Efficient
detection of changes* in https://kubernetes.io/docs/reference/using-api/api-concepts.
"""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import httpx2
import structlog

from scheduler_svc.kubernetes.names import ApiServer, ServiceName

log = structlog.get_logger()

# After a failure, and before a watch is continued: also a server that ends each at once gets few.
RETRY_S = 1.0
# The server ends a watch after this time, and it is continued. A connection that is lost without a
# word is noticed as late.
WATCH_S = 60
_CONNECT_S = 5.0
_SLACK_S = 15.0
_GONE = 410
# By the type of a slice's addresses; those of another type are names and not used.
_FORMS = {"IPv4": "{ip}:{port}", "IPv6": "[{ip}]:{port}"}


_NOT_AS_EXPECTED = (KeyError, TypeError, AttributeError, IndexError)


class _Gone(Exception):
    """The server does not know the changes since this version any more."""


class _Change(NamedTuple):
    version: str
    # Empty of a bookmark, which has a version only.
    name: str
    addresses: frozenset[str]


class EndpointSlices:
    """The addresses of a Service's pods that are ready, or of all if the Service says so.

    While the API server cannot be asked, the last addresses stay.
    """

    def __init__(
        self, service: ServiceName, server: ApiServer, on_change: Callable[[], None]
    ) -> None:
        """`on_change` is called after the addresses have changed."""
        self.service = service
        self._server = server
        self._on_change = on_change
        # By name of the slice.
        self._slices: dict[str, frozenset[str]] = {}
        # Why the last request failed; None if it did not.
        self._problem: str | None = None

    @property
    def addresses(self) -> frozenset[str]:
        return frozenset().union(*self._slices.values())

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            try:
                await self._list_and_watch()
            except _Gone:
                log.info("EndpointSlices are listed again", service=self.service.host)
            except (httpx2.HTTPError, OSError, ValueError) as error:
                self._note_problem(str(error) or type(error).__name__)
            await asyncio.sleep(RETRY_S)

    async def _list_and_watch(self) -> None:
        """List, and follow the changes, until `_Gone`. HTTPError, OSError for a file of the
        account, or ValueError for a response that is not understood."""
        # Created again after a failure: the authority may have changed.
        trust = ssl.create_default_context(cafile=self._server.ca)
        timeout = httpx2.Timeout(_CONNECT_S, read=WATCH_S + _SLACK_S)
        async with httpx2.AsyncClient(
            base_url=self._server.url, verify=trust, timeout=timeout, trust_env=False
        ) as client:
            version = await self._list(client)
            self._note_problem(None)
            while True:
                version = await self._watch(client, version)
                await asyncio.sleep(RETRY_S)

    async def _list(self, client: httpx2.AsyncClient) -> str:
        """Take all slices; return their version."""
        async with self._get(client, {}) as response:
            listed = _parse(await response.aread())
        try:
            version = str(listed["metadata"]["resourceVersion"])
            items = [self._change(item) for item in listed["items"]]
        except _NOT_AS_EXPECTED as error:
            raise ValueError(f"this is no list of EndpointSlices: {error!r}") from error
        self._set({item.name: item.addresses for item in items})
        return version

    async def _watch(self, client: httpx2.AsyncClient, version: str) -> str:
        """Take changes until the server ends the stream; return the last one's version."""
        parameters = {
            "watch": "true",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_S),
        }
        async with self._get(client, parameters) as response:
            async for line in response.aiter_lines():
                change = self._parse_event(line)
                version = change.version
                if change.name:
                    self._set({**self._slices, change.name: change.addresses})
        return version

    @asynccontextmanager
    async def _get(
        self, client: httpx2.AsyncClient, parameters: dict[str, str]
    ) -> AsyncIterator[httpx2.Response]:
        """A response that succeeds. _Gone, or ValueError with the server's reason, otherwise."""
        namespace = self.service.namespace or self._server.read_namespace()
        async with client.stream(
            "GET",
            f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices",
            params={
                "labelSelector": f"kubernetes.io/service-name={self.service.service}",
                **parameters,
            },
            headers={"Authorization": f"Bearer {self._server.read_token()}"},
        ) as response:
            if response.status_code == _GONE:
                raise _Gone
            if not response.is_success:
                body = (await response.aread()).decode(errors="replace")
                raise ValueError(f"the API server responds {response.status_code}: {body[:500]}")
            yield response

    def _parse_event(self, line: str) -> _Change:
        event = _parse(line)
        try:
            kind, item = event["type"], event["object"]
            if kind == "ERROR":
                if item.get("code") == _GONE:
                    raise _Gone
                raise ValueError(f"{item.get('code')}: {item.get('message')}")
            if kind == "BOOKMARK":
                return _Change(item["metadata"]["resourceVersion"], "", frozenset())
            change = self._change(item)
        except _NOT_AS_EXPECTED as error:
            raise ValueError(f"this is no event of an EndpointSlice: {error!r}") from error
        return change._replace(addresses=frozenset()) if kind == "DELETED" else change

    def _change(self, item: dict[str, Any]) -> _Change:
        """KeyError, TypeError, AttributeError or IndexError unless it is an EndpointSlice."""
        form = _FORMS.get(item["addressType"])
        addresses = frozenset(
            # The others of a pod have no meaning.
            form.format(ip=endpoint["addresses"][0], port=self.service.port)
            for endpoint in item.get("endpoints") or ()
            # Absent means ready. A Service with publishNotReadyAddresses calls all of its pods so.
            if form and (endpoint.get("conditions") or {}).get("ready") is not False
        )
        return _Change(item["metadata"]["resourceVersion"], item["metadata"]["name"], addresses)

    def _set(self, slices: dict[str, frozenset[str]]) -> None:
        before = self.addresses
        self._slices = {name: addresses for name, addresses in slices.items() if addresses}
        if self.addresses != before:
            self._on_change()

    def _note_problem(self, problem: str | None) -> None:
        """Logged once, not at every attempt."""
        if problem is not None and problem != self._problem:
            log.warning("EndpointSlices are unknown", service=self.service.host, reason=problem)
        elif problem is None and self._problem is not None:
            log.info("EndpointSlices are known again", service=self.service.host)
        self._problem = problem


def _parse(packed: str | bytes) -> dict[str, Any]:
    """ValueError unless it is an object of JSON."""
    parsed = json.loads(packed)
    if not isinstance(parsed, dict):
        raise ValueError(f"{parsed!r} is no object")
    return parsed
