"""The shards of a running service, their leaders and workers, as any of its schedulers says."""

from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from quire.internal.v1 import operations_pb2, operations_pb2_grpc
from quire.service.channels import INTERNAL_MESSAGE_BYTES, channel_options

_RPC_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class Shard:
    """One shard."""

    # Empty if it has no leader.
    leader: str
    # Addresses of its workers, whether they are there or not.
    workers: Sequence[str] = ()
    # Workers that take requests.
    num_workers: int = 0


@dataclass(frozen=True)
class ClusterView:
    """The shards, in the order of their numbers."""

    shards: Sequence[Shard]
    # Addresses of the schedulers that run.
    schedulers: Sequence[str] = ()

    @property
    def leaders(self) -> frozenset[str]:
        return frozenset(shard.leader for shard in self.shards if shard.leader)

    @property
    def every(self) -> frozenset[int]:
        return frozenset(range(len(self.shards)))

    def led_by(self, address: str | None) -> frozenset[int]:
        return frozenset(n for n, shard in enumerate(self.shards) if shard.leader == address)

    def with_worker(self, address: str | None) -> frozenset[int]:
        return frozenset(n for n, shard in enumerate(self.shards) if address in shard.workers)

    def find_problem(self, num_shards: int, num_workers: int, num_schedulers: int) -> str | None:
        """Return what is missing: shards, a leader, workers, or an even spread over schedulers."""
        if len(self.shards) != num_shards:
            return f"there are {len(self.shards)} of {num_shards} shards"
        for number, shard in enumerate(self.shards):
            if not shard.leader:
                return f"shard {number} has no leader"
            if shard.num_workers != len(shard.workers):
                return f"shard {number} has {shard.num_workers} of {len(shard.workers)} workers"
        if (found := sum(shard.num_workers for shard in self.shards)) != num_workers:
            return f"the leaders have {found} of {num_workers} workers"
        if len(self.schedulers) != num_schedulers:
            return f"{len(self.schedulers)} of {num_schedulers} schedulers are known"
        led = [len(self.led_by(address)) for address in self.schedulers]
        if max(led) - min(led) > 1:
            return f"the schedulers lead {led} shards"
        return None

    def find_move(self, owners: Sequence[str]) -> str | None:
        """Return a shard that will be handed over. `owners`: by shard, the address of the
        scheduler that should lead it by the map of the cluster."""
        if len(owners) != len(self.shards):
            return f"the map has {len(owners)} of {len(self.shards)} shards"
        for number, (shard, owner) in enumerate(zip(self.shards, owners, strict=True)):
            if shard.leader != owner:
                return f"shard {number} is led by {shard.leader or 'none'}, not by {owner or 'any'}"
        return None


def read_cluster(address: str) -> ClusterView:
    """Ask the scheduler at an address. grpc.RpcError if it does not respond."""
    with _channel(address) as channel:
        found = operations_pb2_grpc.OperationsServiceStub(channel).GetCluster(
            operations_pb2.GetClusterRequest(), timeout=_RPC_TIMEOUT_S
        )
    return ClusterView(
        [Shard(one.leader, tuple(one.workers), one.num_workers) for one in found.shards],
        tuple(found.schedulers),
    )


def set_num_shards(address: str, num_shards: int) -> None:
    """Raise the number of shards. grpc.RpcError if the scheduler refuses."""
    with _channel(address) as channel:
        operations_pb2_grpc.OperationsServiceStub(channel).SetNumShards(
            operations_pb2.SetNumShardsRequest(num_shards=num_shards), timeout=_RPC_TIMEOUT_S
        )


def read_status(address: str, shard: int) -> operations_pb2.GetStatusResponse:
    """The status of a shard from its leader. grpc.RpcError if that does not respond."""
    with _channel(address) as channel:
        return operations_pb2_grpc.OperationsServiceStub(channel).GetStatus(
            operations_pb2.GetStatusRequest(shard=shard), timeout=_RPC_TIMEOUT_S
        )


def _channel(address: str) -> grpc.Channel:
    return grpc.insecure_channel(address, options=channel_options(INTERNAL_MESSAGE_BYTES))
