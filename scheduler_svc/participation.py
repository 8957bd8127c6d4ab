"""The part of a shard's leader in the cluster: what it reports to the others and the gateways."""

import asyncio
from collections.abc import Iterable

from quire.internal.v1 import scheduler_pb2
from scheduler_svc.cluster.coordinator import Coordinator
from scheduler_svc.cluster.load import ShardLoad
from scheduler_svc.engine.claims import Claims
from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.moves import Moves
from scheduler_svc.engine.tenant_exchange import TenantExchange
from scheduler_svc.gateway.frame_handler import FrameHandler
from scheduler_svc.leadership.lease import Lease
from scheduler_svc.process import Process
from scheduler_svc.store.store import Store
from scheduler_svc.ticks import sleep_ticks

# Minimum time between two announcements of the cluster's state.
ANNOUNCE_S = 0.25


class Participation:
    """Runs as long as the term."""

    def __init__(
        self,
        process: Process,
        shard: int,
        store: Store,
        engine: Engine,
        handler: FrameHandler,
        claims: Claims,
        moves: Moves,
        tenants: TenantExchange,
        lease: Lease,
    ) -> None:
        self._lease = lease
        self._epoch = store.leadership.epoch
        self._address = process.address
        self._membership = process.membership
        self._engine = engine
        self._handler = handler
        self._claims = claims
        self._moves = moves
        self._tenants = tenants
        # Decides the map of the cluster; None in the terms of other shards.
        self._coordinator = (
            Coordinator(process.membership, store, process.addresses) if shard == 0 else None
        )
        # The map was read since this leader leads. An earlier one may have just added shards.
        self._is_map_current = asyncio.Event()
        # What is known of the cluster is not what was announced.
        self._has_changed = asyncio.Event()

    async def run(self) -> None:
        """Run until cancelled. Errors of the store but StoreUnavailable are raised, in a group."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._announce())
            group.create_task(self._claims.run())
            group.create_task(self._moves.run())
            group.create_task(self._tenants.run())
            if self._coordinator is not None:
                group.create_task(self._coordinate(self._coordinator))

    async def _coordinate(self, coordinator: Coordinator) -> None:
        await self._membership.read_again()
        self._is_map_current.set()
        await coordinator.run()

    async def add_shards(self, num_shards: int) -> None:
        """Raise the number of shards to this one; only in a term of shard 0. Raises StoreError."""
        assert self._coordinator is not None

        async def prepare() -> None:
            await self._claims.claim_all()
            # What tenants use here is known to the new shards before they allow anything.
            await self._tenants.exchange(num_shards)

        await self._is_map_current.wait()
        try:
            await self._coordinator.set_num_shards(num_shards, prepare)
        except BaseException:
            if self._membership.map.num_shards == 1:
                # `prepare` has left this shard without a share, and a single one asks for none.
                self._tenants.undivide()
            raise

    def load(self) -> ShardLoad | None:
        """The shard's load now; None while the lease may have expired."""
        if not self._lease.is_held:
            return None
        engine = self._engine
        lanes = [lane for lane in engine.lanes.values() if not lane.draining]
        return ShardLoad(
            leader=self._address,
            num_workers=len(lanes),
            num_free_rows=sum(
                max(0, lane.limits.max_num_seqs - len(lane.rows) - len(lane.assigned))
                for lane in lanes
            ),
            num_live=engine.num_sequences,
            num_waiting=len(engine.waiting),
            num_asks=self._tenants.num_asks,
            num_gateways=self._handler.num_gateways,
            epoch=self._epoch,
            num_free_tokens=max((lane.num_free_tokens for lane in lanes), default=0),
        )

    async def _announce(self) -> None:
        """Send the state of all shards to the gateways when it has changed. With many shards less
        often, since each of their leaders sends it."""
        membership, has_changed = self._membership, self._has_changed
        announced: list[ShardLoad] = []

        def compare() -> None:
            if announced != membership.loads:
                has_changed.set()

        membership.listen(compare)
        compare()
        try:
            while True:
                await has_changed.wait()
                has_changed.clear()
                announced = membership.loads
                self._handler.announce_cluster(cluster_state(announced))
                await sleep_ticks(ANNOUNCE_S * max(1.0, membership.map.num_shards / 16))
        finally:
            membership.stop_listening(compare)


def cluster_state(loads: Iterable[ShardLoad]) -> scheduler_pb2.ClusterState:
    """The state of all shards, for gateways."""
    return scheduler_pb2.ClusterState(
        shards=[
            scheduler_pb2.ShardState(
                leader=load.leader,
                num_workers=load.num_workers,
                num_live=load.num_live,
                num_waiting=load.num_waiting,
            )
            for load in loads
        ]
    )
