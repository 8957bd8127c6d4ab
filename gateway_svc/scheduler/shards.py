"""The gateway's connections to the leaders of all shards."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import structlog

from gateway_svc.scheduler.connection import ShardConnection
from gateway_svc.scheduler.multiplexer import Multiplexer, scheduler_unavailable
from gateway_svc.scheduler.outages import Outage, Outages
from gateway_svc.scheduler.request_router import RequestRouter
from gateway_svc.scheduler.route import RoutingCounters
from quire.internal.v1 import operations_pb2, scheduler_pb2
from quire.service.errors import RequestError
from quire.service.tls import TLS

log = structlog.get_logger()


@dataclass(frozen=True)
class ShardStatus:
    # The leader's address.
    leader: str
    status: operations_pb2.GetStatusResponse


class Shards:
    """One connection per shard, and the requests that are routed over them.

    There is one shard until a scheduler reports more; their number never falls. A shard without a
    leader does not affect the others.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        max_queued_tokens: int,
        wait_s: float,
        on_state: Callable[[str | None], object],
        counters: RoutingCounters,
        tls: TLS | None,
        was_suspended: Callable[[], bool],
    ) -> None:
        """`wait_s` bounds the wait for a leader. `on_state` is called with the reason why requests
        cannot run on any shard, or None when they can. `tls` is for the connections to leaders.
        `was_suspended`: whether this process was, just now."""
        # Of all shards together: a request can run while one shard can run it.
        self.outages = Outages()
        self._addresses = addresses
        self._wait_s = wait_s
        self._on_state = on_state
        self._tls = tls
        self._connections: list[ShardConnection] = []
        # Set with the first connection, or by `detach_all`.
        self._waits_end = asyncio.Event()
        # Of requests that wait for the first connection, once they are ended.
        self._end: RequestError | None = None
        self._is_started = False
        # The last reason that `on_state` was called with.
        self._reason: str | None = None
        self.requests = RequestRouter(max_queued_tokens, wait_s, counters, self._add, was_suspended)

    @property
    def max_model_len(self) -> int | None:
        """The longest sequence that every shard accepts, as last reported; None until then."""
        reported = [one.max_model_len for one in self._connections]
        return min((length for length in reported if length is not None), default=None)

    @property
    def leaders(self) -> Sequence[str | None]:
        """By shard, the address of its leader; None while it is not connected."""
        return [connection.leader for connection in self._connections]

    def start(self) -> None:
        """Connect to the leader of each shard, and reconnect until closed."""
        self._is_started = True
        self._publish()
        for connection in self._connections:
            connection.start()

    async def close(self, timeout_s: float) -> None:
        """Send what is queued, for at most `timeout_s`, and disconnect."""
        self._is_started = False
        await self.requests.close_lookups()
        await asyncio.gather(*(one.close(timeout_s) for one in self._connections))

    async def wait_until_connected(self) -> None:
        """Wait for the first connection, whose hello limits requests. RequestError after
        `wait_s`, and after `detach_all`.
        """
        if not self._waits_end.is_set():
            try:
                async with asyncio.timeout(self._wait_s):
                    await self._waits_end.wait()
            except TimeoutError:
                raise scheduler_unavailable() from None
        if self._end is not None:
            # Without the traceback of others.
            raise replace(self._end)

    def detach_all(self, error: RequestError) -> None:
        """End with `error` every stream, whose request runs on and can be resumed elsewhere, and
        every request that waits for the first connection."""
        self._end = error
        self._waits_end.set()
        self.requests.detach_all(error)

    async def status(self) -> Sequence[ShardStatus | None]:
        """By shard, its status, with block maps; None if its leader did not send one.
        RequestError if none did."""
        found = await asyncio.gather(*map(_status_of, self._connections))
        statuses = [one if isinstance(one, ShardStatus) else None for one in found]
        if not any(statuses):
            failures = (one for one in found if isinstance(one, RequestError))
            raise next(failures, scheduler_unavailable())
        return statuses

    def _add(self, shard: int, requests: Multiplexer) -> None:
        connection = ShardConnection(
            shard,
            self._addresses,
            requests,
            self._publish,
            self._on_cluster,
            lambda num_shards: self.requests.add_shards(num_shards),
            self._tls,
        )
        self._connections.append(connection)
        if self._is_started:
            log.info("shard added", shard=shard)
            connection.start()

    def _on_cluster(self, source: int, cluster: scheduler_pb2.ClusterState) -> None:
        """Learn the shards, their leaders and loads, as the leader of one knows them."""
        self.requests.report(source, cluster)
        for connection, state in zip(self._connections, cluster.shards, strict=False):
            if state.leader:
                connection.suggest(state.leader)

    def _publish(self) -> None:
        """Publish the state of all shards together."""
        if any(one.outage is not Outage.SCHEDULER for one in self._connections):
            self._waits_end.set()
        outages = [one.outage for one in self._connections]
        is_ready = None in outages
        is_connected = Outage.WORKER in outages
        self.outages.set(None if is_ready else Outage.WORKER if is_connected else Outage.SCHEDULER)
        reason = None if is_ready else self._first_reason()
        if not self._is_started or (reason == self._reason and len(outages) > 1):
            return
        self._reason = reason
        self._on_state(reason)

    def _first_reason(self) -> str | None:
        first = self._connections[0]
        return first.reason if len(self._connections) == 1 else f"shard 0: {first.reason}"


async def _status_of(connection: ShardConnection) -> ShardStatus | RequestError | None:
    """None without a leader."""
    leader = connection.leader
    if leader is None:
        return None
    try:
        return ShardStatus(leader, await connection.status())
    except RequestError as error:
        return error
