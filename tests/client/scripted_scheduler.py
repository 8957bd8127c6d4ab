"""A gRPC server with scripted statuses."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc

from quire.internal.v1 import operations_pb2, operations_pb2_grpc
from quire.internal.v1.operations_pb2 import GetStatusResponse
from quire.service.channels import server_options


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
