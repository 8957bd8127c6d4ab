"""Environments of the services of a local stack."""

from pathlib import Path

import pytest

from quire.launcher.processes import ServiceSpec, StartCheck
from quire.launcher.services import ServiceSpecs


def worker_specs(num_workers: int, settings: dict[str, str] | None = None) -> list[ServiceSpec]:
    specs = ServiceSpecs(Path("/private"), num_workers, settings or {}, verbose=False)
    sockets = specs.sockets("worker", num_workers)
    return specs.make("worker", sockets, {}, StartCheck("model", "load the model"))


@pytest.mark.parametrize(("num_workers", "share"), [(1, 0.9), (2, 0.45), (3, 0.3)])
def test_workers_share_the_machine(
    num_workers: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    workers = worker_specs(num_workers)
    assert len(workers) == num_workers
    for worker in workers:
        environment = worker.environment
        assert float(environment["QUIRE_WORKER_GPU_MEMORY_UTILIZATION"]) == pytest.approx(share)
        assert int(environment["QUIRE_WORKER_THREADS"]) == 8 // num_workers


def test_a_setting_overrides_the_equal_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_WORKER_GPU_MEMORY_UTILIZATION", "0.2")
    [worker] = worker_specs(1, {"QUIRE_WORKER_THREADS": "7"})
    assert worker.environment["QUIRE_WORKER_GPU_MEMORY_UTILIZATION"] == "0.2"
    assert worker.environment["QUIRE_WORKER_THREADS"] == "7"


def test_http_is_served_only_at_the_address_of_the_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    def listens(settings: dict[str, str | None], http_listen: str | None = None) -> str | None:
        specs = ServiceSpecs(Path("/private"), 1, settings, verbose=False)
        check = StartCheck("tokenizer", "load the model's tokenizer")
        [gateway] = specs.make("gateway", ["127.0.0.1:0"], {}, check, http_listen)
        assert gateway.http_listen == http_listen
        return gateway.environment.get("QUIRE_GATEWAY_HTTP_LISTEN")

    monkeypatch.setenv("QUIRE_GATEWAY_HTTP_LISTEN", "0.0.0.0:8000")
    assert listens({}) is None
    # The flag overrides it.
    assert listens({}, "127.0.0.1:8000") == "0.0.0.0:8000"
    assert listens({"QUIRE_GATEWAY_HTTP_LISTEN": "127.0.0.1:1"}) == "127.0.0.1:1"
