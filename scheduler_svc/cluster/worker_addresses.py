"""The addresses of workers, and which of them belong to a shard."""

from collections.abc import Callable

from quire.service.addresses import NameResolver
from scheduler_svc.cluster.membership import Membership


class WorkerAddresses:
    """The workers that the names resolve to, for all shards of this process."""

    def __init__(self, names: tuple[str, ...], membership: Membership) -> None:
        self._listeners: set[Callable[[], None]] = set()
        self._resolver = NameResolver(names, self._notify)
        self._membership = membership
        self._map_version = membership.map.version
        membership.listen(self._on_heard)

    async def run(self) -> None:
        """Resolve until cancelled."""
        await self._resolver.run()

    @property
    def all(self) -> frozenset[str]:
        """The addresses of all names, as last resolved."""
        return self._resolver.addresses

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
        """As `NameResolver.host_of`."""
        return self._resolver.host_of(address)

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
