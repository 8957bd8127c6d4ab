"""gRPC servers of a scheduler that leads, with scripted statuses, and of one that stands by."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_servers import server_options
from grpc_status import rpc_status

from quire.internal.v1 import operations_pb2, operations_pb2_grpc
from quire.internal.v1.operations_pb2 import GetStatusResponse
from quire.service.errors import invalid, unavailable


class ScriptedScheduler(operations_pb2_grpc.OperationsServiceServicer):
    """Returns its statuses in order, and then always the last one. Of several shards it leads those
    without another leader, or with an empty one, and names the leaders of the others."""

    def __init__(
        self,
        address: str,
        readings: Sequence[GetStatusResponse] = (),
        leaders: Mapping[int, str] | None = None,
        num_shards: int = 1,
    ) -> None:
        self.address = address
        self.num_shards = num_shards
        self.leaders = leaders or {}
        self._readings = list(readings)
        self._server = grpc.server(ThreadPoolExecutor(2), options=server_options())
        operations_pb2_grpc.add_OperationsServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(address)
        self._server.start()

    def GetCluster(self, request, context):  # noqa: N802
        return cluster([self.leaders.get(shard, self.address) for shard in range(self.num_shards)])

    def SetNumShards(self, request, context):  # noqa: N802
        self._check_lead(0, context)
        if request.num_shards < self.num_shards:
            limits = f"from {self.num_shards}, the present number, to 128"
            message = f"must be {limits} (got {request.num_shards})"
            error = invalid("num_shards", "NUM_SHARDS_OUT_OF_RANGE", message)
            context.abort_with_status(rpc_status.to_status(error.to_status()))
        self.num_shards = request.num_shards
        return operations_pb2.SetNumShardsResponse()

    def _check_lead(self, shard, context):
        if shard in self.leaders:
            refuse(context, self.leaders[shard])

    def GetStatus(self, request, context):  # noqa: N802
        self._check_lead(request.shard, context)
        reading = GetStatusResponse()
        reading.CopyFrom(self._readings[0])
        if len(self._readings) > 1:
            del self._readings[0]
        if not request.with_block_maps:
            for worker in reading.workers:
                worker.ClearField("block_map")
                worker.ClearField("num_cached_blocks")
        return reading

    def ResetPrefixCache(self, request, context):  # noqa: N802
        self._check_lead(request.shard, context)
        return operations_pb2.ResetPrefixCacheResponse(num_blocks=12)

    def stop(self) -> None:
        self._server.stop(None).wait()


class ScriptedStandby(operations_pb2_grpc.OperationsServiceServicer):
    """Refuses all calls and names the leader."""

    def __init__(self, address: str, leader: str) -> None:
        self.leader = leader
        self._server = grpc.server(ThreadPoolExecutor(2), options=server_options())
        operations_pb2_grpc.add_OperationsServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(address)
        self._server.start()

    def GetCluster(self, request, context):  # noqa: N802
        return cluster([self.leader])

    def SetNumShards(self, request, context):  # noqa: N802
        refuse(context, self.leader)

    def GetStatus(self, request, context):  # noqa: N802
        refuse(context, self.leader)

    def ResetPrefixCache(self, request, context):  # noqa: N802
        refuse(context, self.leader)

    def stop(self) -> None:
        self._server.stop(None).wait()


def cluster(leaders: Sequence[str]) -> operations_pb2.GetClusterResponse:
    """A cluster whose shards have these leaders, each with a worker of two."""
    return operations_pb2.GetClusterResponse(
        shards=[
            operations_pb2.ClusterShard(
                leader=leader,
                workers=[f"worker-{shard}a:1", f"worker-{shard}b:1"],
                num_workers=1,
                num_live=1000 + shard,
                num_waiting=shard,
            )
            for shard, leader in enumerate(leaders)
        ],
        schedulers=sorted({*leaders} - {""}),
    )


def refuse(context: grpc.ServicerContext, leader: str) -> None:
    """Refuse a call as a scheduler that does not lead, and name the leader unless it is unknown."""
    metadata = {"leader": leader} if leader else {}
    error = unavailable("STANDBY", "this scheduler does not lead", metadata=metadata)
    context.abort_with_status(rpc_status.to_status(error.to_status()))
