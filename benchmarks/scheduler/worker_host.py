"""`python -m benchmarks.scheduler.worker_host CONTROL MODEL SOCKET...`: simulated workers.

They run in one process, each with its own server and device thread. MODEL is a SimModel as JSON.
"""

import asyncio
import json
import sys
from pathlib import Path

import grpc

from benchmarks.scheduler import control
from quire.internal.v1 import worker_pb2_grpc
from quire.service.channels import INTERNAL_MESSAGE_BYTES, server_options
from worker_svc.runner.device_thread import DeviceThread
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


async def _main(path: Path, model: SimModel, sockets: list[str]) -> None:
    host = WorkerHost(model, len(sockets))
    servers = [
        await _serve(runner, f"unix:{socket}")
        for runner, socket in zip(host.runners, sockets, strict=True)
    ]
    control.serve(path, {"hold": host.hold, "release": host.release, "violations": host.violations})
    await asyncio.gather(*(server.wait_for_termination() for server in servers))


async def _serve(runner: SimRunner, address: str) -> grpc.aio.Server:
    servicer = WorkerServicer(DeviceThread())
    servicer.serve(loaded_runner(runner))
    server = grpc.aio.server(options=server_options(INTERNAL_MESSAGE_BYTES))
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)
    server.add_insecure_port(address)
    await server.start()
    return server


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1]), SimModel(**json.loads(sys.argv[2])), sys.argv[3:]))
