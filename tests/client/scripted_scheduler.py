"""gRPC servers of a scheduler that leads, with scripted statuses, and of one that stands by."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_status import rpc_status

from quire.internal.v1 import operations_pb2, operations_pb2_grpc
from quire.internal.v1.operations_pb2 import GetStatusResponse
from quire.service.channels import server_options
from quire.service.errors import unavailable


class ScriptedScheduler(operations_pb2_grpc.OperationsServiceServicer):
    """Returns its statuses in order, and then always the last one."""

    def __init__(self, address: str, readings: Sequence[GetStatusResponse] = ()) -> None:
        self._readings = list(readings)
        self._server = grpc.server(ThreadPoolExecutor(2), options=server_options())
        operations_pb2_grpc.add_OperationsServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(address)
        self._server.start()

    def GetStatus(self, request, context):  # noqa: N802
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

    def GetStatus(self, request, context):  # noqa: N802
        self._refuse(context)

    def ResetPrefixCache(self, request, context):  # noqa: N802
        self._refuse(context)

    def _refuse(self, context):
        error = unavailable(
            "STANDBY", "this scheduler does not lead", metadata={"leader": self.leader}
        )
        context.abort_with_status(rpc_status.to_status(error.to_status()))

    def stop(self) -> None:
        self._server.stop(None).wait()
