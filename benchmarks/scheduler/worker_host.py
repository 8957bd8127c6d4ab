"""`python -m benchmarks.scheduler.worker_host CONTROL MODEL SOCKET...`: simulated workers.

They run in one process, each with its own server and device thread. MODEL is a SimModel as JSON.
"""

import asyncio
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import grpc
import uvloop

from benchmarks.scheduler import control
from quire.internal.v1 import worker_pb2_grpc
from quire.service.channels import INTERNAL_MESSAGE_BYTES
from quire.service.http2.limits import Limits
from quire.service.http2.server import Server
from worker_svc.runner.device_thread import DeviceThread
from worker_svc.service.server import SWITCH_INTERVAL_S
from worker_svc.service.servicer import WorkerServicer
from worker_svc.sim.runner import SimModel, SimRunner
from worker_svc.sim.runner_loading import loaded_runner


class WorkerHost:
    """Controls the runners from the control thread."""

    def __init__(self, model: SimModel, num_workers: int) -> None:
        self.runners = [SimRunner(model) for _ in range(num_workers)]

    def hold(self) -> None:
        """Block all steps until `release`."""
        for runner in self.runners:
            runner.gate.clear()

    def release(self) -> None:
        for runner in self.runners:
            runner.gate.set()

    def violations(self) -> list[str]:
        """Return the plans' violations of the rules of paged attention."""
        return [str(error) for runner in self.runners for error in runner.kv_checker.violations]


class Traffic:
    """Counts the messages of streams and their bytes, headers excluded."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(("received", "received_bytes", "sent", "sent_bytes"), 0)

    def counts(self) -> dict[str, int]:
        return self._counts

    def counted(self, handler: Any) -> Any:
        """A handler of the same method whose messages are counted."""
        if handler is None or handler.stream_stream is None:
            return handler
        return grpc.stream_stream_rpc_method_handler(
            handler.stream_stream,
            lambda data: handler.request_deserializer(self._count("received", data)),
            lambda message: self._count("sent", handler.response_serializer(message)),
        )

    def _count(self, kind: str, data: bytes) -> bytes:
        self._counts[kind] += 1
        self._counts[f"{kind}_bytes"] += len(data)
        return data


class _Counted(grpc.GenericRpcHandler):
    """Handlers whose messages are counted."""

    def __init__(self, handlers: grpc.GenericRpcHandler, traffic: Traffic) -> None:
        self._handlers = handlers
        self._traffic = traffic

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return self._traffic.counted(self._handlers.service(handler_call_details))


class _CountingServer(Server):
    """A worker's server whose traffic is counted."""

    def __init__(self, traffic: Traffic) -> None:
        super().__init__(Limits(INTERNAL_MESSAGE_BYTES))
        self._traffic = traffic

    def add_generic_rpc_handlers(
        self, generic_rpc_handlers: Iterable[grpc.GenericRpcHandler]
    ) -> None:
        super().add_generic_rpc_handlers(
            _Counted(handlers, self._traffic) for handlers in generic_rpc_handlers
        )


async def _main(path: Path, model: SimModel, sockets: list[str]) -> None:
    host = WorkerHost(model, len(sockets))
    traffic = Traffic()
    servers = [
        await _serve(runner, f"unix:{socket}", traffic)
        for runner, socket in zip(host.runners, sockets, strict=True)
    ]
    commands = {"hold": host.hold, "release": host.release, "violations": host.violations}
    control.serve(path, {**commands, "traffic": traffic.counts})
    await asyncio.gather(*(server.wait_for_termination() for server in servers))


async def _serve(runner: SimRunner, address: str, traffic: Traffic) -> grpc.aio.Server:
    servicer = WorkerServicer(DeviceThread())
    servicer.serve(loaded_runner(runner))
    server = _CountingServer(traffic)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)
    server.add_insecure_port(address)
    await server.start()
    return server


if __name__ == "__main__":
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    uvloop.run(_main(Path(sys.argv[1]), SimModel(**json.loads(sys.argv[2])), sys.argv[3:]))
