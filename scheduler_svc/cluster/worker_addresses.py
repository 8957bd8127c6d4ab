"""The addresses of workers, and which of them belong to a shard."""

import asyncio
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import TYPE_CHECKING

from quire.service.addresses import NameResolver
from scheduler_svc.cluster.membership import Membership
from scheduler_svc.kubernetes.names import PREFIX, ApiServer, ServiceName

if TYPE_CHECKING:
    from scheduler_svc.kubernetes.endpoint_slices import EndpointSlices


class WorkerAddresses:
    """The workers that the names stand for, for all shards of this process."""

    def __init__(
        self, names: tuple[str, ...], membership: Membership, api: ApiServer | None = None
    ) -> None:
        """ValueError if a name is that of a Service of Kubernetes, and there is no `api`."""
        self._listeners: set[Callable[[], None]] = set()
        services = [name for name in names if name.startswith(PREFIX)]
        hosts = [name for name in names if name not in services]
        self._resolver = NameResolver(hosts, self._notify)
        self._services = _watched(services, api, self._notify) if services else []
        self._membership = membership
        self._map_version = membership.map.version
        membership.listen(self._on_heard)

    async def run(self) -> None:
        """Resolve, and watch Services, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._resolver.run())
            for service in self._services:
                group.create_task(service.run())

    @property
    def all(self) -> frozenset[str]:
        """The addresses of all names, as last resolved or seen."""
        return self._resolver.addresses.union(*(x.addresses for x in self._services))

    def of(self, shard: int) -> frozenset[str]:
        """The addresses that belong to a shard; all if it is the only one."""
        if self._membership.map.num_shards == 1:
            return self.all
        workers = self._membership.map.workers
        return frozenset(address for address in self.all if workers.get(address) == shard)

    def is_elsewhere(self, address: str, shard: int) -> bool:
        """Whether the address belongs to another shard; False if it is not known."""
        cluster = self._membership.map
        return cluster.num_shards > 1 and cluster.workers.get(address, shard) != shard

    def host_of(self, address: str) -> str:
        """As `NameResolver.host_of`; of a pod of a Service, the name of the Service."""
        hosts = (x.service.host for x in self._services if address in x.addresses)
        return next(hosts, None) or self._resolver.host_of(address)

    def listen(self, listener: Callable[[], None]) -> None:
        """Call this after the addresses or their shards may have changed."""
        self._listeners.add(listener)

    def stop_listening(self, listener: Callable[[], None]) -> None:
        self._listeners.discard(listener)

    def _on_heard(self) -> None:
        if self._map_version != self._membership.map.version:
            self._map_version = self._membership.map.version
            self._notify()

    def _notify(self) -> None:
        for listener in list(self._listeners):
            listener()


def _watched(
    names: Iterable[str], api: ApiServer | None, on_change: Callable[[], None]
) -> "list[EndpointSlices]":
    if api is None:
        raise ValueError("Services of Kubernetes need its API server")
    # Imported by name: its HTTP client is an extra.
    module = import_module("scheduler_svc.kubernetes.endpoint_slices")
    return [module.EndpointSlices(ServiceName.parse(name), api, on_change) for name in names]
