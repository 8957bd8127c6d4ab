"""Commands, files and environments of the services of a local stack."""

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.launcher.directory import running_directories
from quire.launcher.errors import LaunchError
from quire.launcher.processes import ServiceSpec, StartCheck

# A package that only this extra of the distribution installs.
_EXTRAS = {"gateway": "tokenizers", "scheduler": "redis", "worker": "torch"}

_HTTP_LISTEN = "QUIRE_GATEWAY_HTTP_LISTEN"


def check_installed(extras: Mapping[str, str] = _EXTRAS) -> None:
    """LaunchError with the missing extras, if a package is not installed. Imports no package."""
    missing = {e: package for e, package in extras.items() if not importlib.util.find_spec(package)}
    if missing:
        names = "all" if len(missing) == len(extras) else ",".join(missing)
        packages = ", ".join(missing.values())
        raise LaunchError(f"a local stack needs {packages}: pip install 'quire[{names}]'")


@dataclass(frozen=True)
class ServiceSpecs:
    """Makes the specifications of the services of one stack."""

    # Contains their sockets, logs and address files.
    directory: Path
    num_workers: int
    # `QUIRE_*` variables that override those of this process; None removes one.
    settings: Mapping[str, str | None]
    # Writes logs to the terminal.
    verbose: bool

    def make(
        self,
        service: str,
        listens: Sequence[str],
        flags: Mapping[str, str | None],
        start_check: StartCheck,
        http_listen: str | None = None,
    ) -> list[ServiceSpec]:
        """One specification per address; flags that are None are omitted. `http_listen` is the
        first one's address for HTTP."""
        arguments = [f"--{key}={value}" for key, value in flags.items() if value is not None]
        https: Sequence[str | None] = [None] * len(listens)
        if http_listen is not None:
            https = consecutive_addresses(http_listen, len(listens))
        specs = []
        for name, listen, http in zip(_names(service, len(listens)), listens, https, strict=True):
            address_file = self.directory / f"{name}.address"
            http_file = self.directory / f"{name}.http-address" if http else None
            command = [sys.executable, "-m", f"{service}_svc", *arguments]
            progress_file = self.directory / f"{name}.progress" if service == "worker" else None
            if progress_file is not None:
                command.append(f"--progress-file={progress_file}")
            if http_file is not None:
                command.append(f"--http-address-file={http_file}")
            specs.append(
                ServiceSpec(
                    name=name,
                    command=[*command, f"--address-file={address_file}"],
                    address_file=address_file,
                    log_file=None if self.verbose else self.directory / f"{name}.log",
                    environment=self._environment(service, http),
                    start_check=start_check,
                    listen=listen,
                    http_listen=http,
                    http_address_file=http_file,
                    progress_file=progress_file,
                    # The address itself may have TLS.
                    health_listen=f"unix:{self.directory}/{name}.health.sock",
                )
            )
        return specs

    def sockets(self, service: str, count: int) -> list[str]:
        """Unix socket addresses, one per process of the service."""
        return [f"unix:{self.directory}/{name}.sock" for name in _names(service, count)]

    def _environment(self, service: str, http_listen: str | None) -> dict[str, str]:
        """Human-readable logs, and an equal share of the cores and of a GPU per worker, unless
        this process's environment or the settings have other values. A stack without HTTP does not
        serve it at the address of this process's environment."""
        threads = max(1, (os.cpu_count() or 1) // self.num_workers)
        defaults = {
            f"QUIRE_{service.upper()}_LOG_FORMAT": "human",
            "QUIRE_WORKER_THREADS": str(threads),
            "QUIRE_WORKER_GPU_MEMORY_UTILIZATION": str(0.9 / self.num_workers),
        }
        inherited = dict(os.environ)
        if http_listen is None:
            inherited.pop(_HTTP_LISTEN, None)
        merged = {**defaults, **inherited, **self.settings}
        return {name: value for name, value in merged.items() if value is not None}


def running_schedulers() -> list[str]:
    """Addresses of the schedulers of this user's stacks that run on this machine, without stacks
    of several schedulers, of which only one leads."""
    sockets = (path / "scheduler.sock" for path in running_directories())
    return [f"unix:{socket}" for socket in sockets if socket.exists()]


def _names(service: str, count: int) -> list[str]:
    """Names of processes. Workers always have a number, other services if there are several."""
    if count == 1 and service != "worker":
        return [service]
    return [f"{service}-{i}" for i in range(count)]


def consecutive_addresses(listen: str, count: int) -> list[str]:
    """The address and those with the following ports; port 0 is repeated."""
    host, _, port = listen.rpartition(":")
    if count == 1 or port == "0":
        return [listen] * count
    if not port.isdigit():
        return [f"{listen}-{i}" for i in range(count)]
    return [f"{host}:{int(port) + i}" for i in range(count)]
