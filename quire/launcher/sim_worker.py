"""A simulated worker of one's own, for as long as a context lasts."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from quire.launcher.directory import PrivateDirectory
from quire.launcher.processes import ProcessGroup, ServiceSpec, StartCheck

_READY_TIMEOUT_S = 60.0
_STOP_GRACE_S = 5.0


@contextmanager
def sim_worker(flags: Mapping[str, object]) -> Iterator[str]:
    """Starts a worker process with these flags and gives its address. LaunchError if it does not
    start. What the environment says of workers does not count."""
    directory = PrivateDirectory.make()
    address = f"unix:{directory.path}/worker.sock"
    given = {"engine": "sim", "listen": address, "log-format": "human", **flags}
    spec = ServiceSpec(
        name="worker",
        command=[
            *(sys.executable, "-m", "worker_svc"),
            *(f"--{name}={value}" for name, value in given.items()),
            f"--address-file={directory.path}/worker.address",
        ],
        address_file=directory.path / "worker.address",
        log_file=directory.path / "worker.log",
        environment={k: v for k, v in os.environ.items() if not k.startswith("QUIRE_WORKER_")},
        start_check=StartCheck("model", "serve"),
    )
    group = ProcessGroup()
    try:
        group.start([spec])
        group.wait_until_ready(_READY_TIMEOUT_S)
        yield address
    finally:
        group.stop(_STOP_GRACE_S)
        directory.remove()
