"""How the services of a local stack are run: their commands, files, environment."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quire.launcher.processes import ServiceSpec, StartCheck


@dataclass(frozen=True, kw_only=True)
class Services:
    """The services of one stack, by what is to be known of it."""

    # Holds their sockets, logs and addresses.
    directory: Path
    model: str
    revision: str | None
    served_model_name: str | None
    num_workers: int
    num_schedulers: int
    num_gateways: int
    gateway_listen: str
    redis_url: str
    redis_patience_s: float
    # `QUIRE_*` variables over those of this process.
    settings: Mapping[str, str]
    verbose: bool

    def gateways(self) -> list[ServiceSpec]:
        flags = {
            "scheduler": ",".join(self._sockets("scheduler", self.num_schedulers)),
            "model": self.model,
            "revision": self.revision,
            "served-model-name": self.served_model_name,
        }
        check = StartCheck("tokenizer", "load the model's tokenizer")
        listens = _following(self.gateway_listen, self.num_gateways)
        return self._specs("gateway", listens, flags, check)

    def schedulers(self) -> list[ServiceSpec]:
        workers = ",".join(self._sockets("worker", self.num_workers))
        flags = {"redis-url": self.redis_url, "workers": workers}
        check = StartCheck("redis", "reach Redis", self.redis_patience_s)
        listens = self._sockets("scheduler", self.num_schedulers)
        return self._specs("scheduler", listens, flags, check)

    def workers(self) -> list[ServiceSpec]:
        flags = {"model": self.model, "revision": self.revision}
        check = StartCheck("model", "load the model")
        return self._specs("worker", self._sockets("worker", self.num_workers), flags, check)

    def _specs(
        self,
        service: str,
        listens: list[str],
        flags: Mapping[str, str | None],
        check: StartCheck,
    ) -> list[ServiceSpec]:
        """One for each address."""
        arguments = [f"--{key}={value}" for key, value in flags.items() if value is not None]
        specs = []
        for name, listen in zip(_names(service, len(listens)), listens, strict=True):
            address_file = self.directory / f"{name}.address"
            command = [sys.executable, "-m", f"{service}_svc", *arguments]
            specs.append(
                ServiceSpec(
                    name=name,
                    command=[*command, f"--address-file={address_file}"],
                    address_file=address_file,
                    log_file=None if self.verbose else self.directory / f"{name}.log",
                    environment=self._environment(service),
                    start_check=check,
                    listen=listen,
                )
            )
        return specs

    def _sockets(self, service: str, count: int) -> list[str]:
        return [f"unix:{self.directory}/{name}.sock" for name in _names(service, count)]

    def _environment(self, service: str) -> dict[str, str]:
        """What a person wants to read, and an equal share of the cores and of a GPU for each
        worker; what the environment says goes first."""
        threads = max(1, (os.cpu_count() or 1) // self.num_workers)
        defaults = {
            f"QUIRE_{service.upper()}_LOG_FORMAT": "human",
            "QUIRE_WORKER_THREADS": str(threads),
            "QUIRE_WORKER_GPU_MEMORY_UTILIZATION": str(0.9 / self.num_workers),
        }
        return {**defaults, **os.environ, **self.settings}


def _names(service: str, count: int) -> list[str]:
    """Workers are numbered always, the others where there are several."""
    if count == 1 and service != "worker":
        return [service]
    return [f"{service}-{i}" for i in range(count)]


def _following(listen: str, count: int) -> list[str]:
    """This address and those of the next ports; where the system picks, it picks for each."""
    host, _, port = listen.rpartition(":")
    if count == 1 or port == "0":
        return [listen] * count
    if not port.isdigit():
        return [f"{listen}-{i}" for i in range(count)]
    return [f"{host}:{int(port) + i}" for i in range(count)]
