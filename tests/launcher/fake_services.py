"""Small child processes that behave like services."""

import sys
from dataclasses import replace
from pathlib import Path

from quire.launcher.processes import ServiceSpec, StartCheck

_SERVE = """
import os, signal, sys, threading
from concurrent.futures import ThreadPoolExecutor
import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
status, address_file, order_file, name = sys.argv[1:]
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
server = grpc.server(ThreadPoolExecutor(2))
servicer = health.HealthServicer()
for check in ("ready", "model"):
    servicer.set(check, health_pb2.HealthCheckResponse.ServingStatus.Value(status))
health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
port = server.add_insecure_port("127.0.0.1:0")
server.start()
with open(address_file + ".partial", "w") as file:
    file.write(f"127.0.0.1:{port}")
os.rename(address_file + ".partial", address_file)
print("loading the weights", file=sys.stderr, flush=True)
# The signal may be delivered to another thread.
while not stop.wait(0.05):
    pass
with open(order_file, "a") as file:
    file.write(name + "\\n")
"""

_IGNORE_TERM = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1], "w").close()
time.sleep(600)
"""


class FakeServices:
    """Specifications of fake services, all in one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.order_file = directory / "order"

    def ready(self, name: str) -> ServiceSpec:
        """Report ready at once, and write the name to the order file when it stops."""
        return self._serving(name, "SERVING")

    def never_ready(self, name: str) -> ServiceSpec:
        return self._serving(name, "NOT_SERVING")

    def without_model(self, name: str) -> ServiceSpec:
        """Run without being ready, because it could not load its model."""
        return self.with_failing_check(name, timeout_s=0.0)

    def with_failing_check(self, name: str, timeout_s: float) -> ServiceSpec:
        check = StartCheck("model", "load the model", timeout_s)
        return replace(self._serving(name, "NOT_SERVING"), start_check=check)

    def failing(self, name: str) -> ServiceSpec:
        """Write 30 lines and end with status 3."""
        script = "import sys; [print('line', i) for i in range(30)]; sys.exit(3)"
        return self._spec(name, script)

    def ignoring_sigterm(self, name: str) -> ServiceSpec:
        """Ignore SIGTERM once its address file exists."""
        return self._spec(name, _IGNORE_TERM, str(self.directory / f"{name}.address"))

    @property
    def stopped(self) -> list[str]:
        return self.order_file.read_text().split()

    def _serving(self, name: str, status: str) -> ServiceSpec:
        address_file = str(self.directory / f"{name}.address")
        return self._spec(name, _SERVE, status, address_file, str(self.order_file), name)

    def _spec(self, name: str, script: str, *arguments: str) -> ServiceSpec:
        return ServiceSpec(
            name=name,
            command=[sys.executable, "-c", script, *arguments],
            address_file=self.directory / f"{name}.address",
            log_file=self.directory / f"{name}.log",
            environment={},
        )
