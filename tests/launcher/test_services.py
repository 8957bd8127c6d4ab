"""What the services of a local stack are started with."""

from pathlib import Path

import pytest

from quire.launcher.services import Services


def services(num_workers: int, settings: dict[str, str] | None = None) -> Services:
    return Services(
        directory=Path("/private"),
        model="/model",
        revision=None,
        served_model_name=None,
        num_workers=num_workers,
        num_schedulers=1,
        num_gateways=1,
        gateway_listen="127.0.0.1:0",
        redis_url="unix:///private/redis.sock",
        redis_patience_s=1.0,
        settings=settings or {},
        verbose=False,
    )


@pytest.mark.parametrize(("num_workers", "share"), [(1, 0.9), (2, 0.45), (3, 0.3)])
def test_workers_share_the_machine(
    num_workers: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    workers = services(num_workers).workers()
    assert len(workers) == num_workers
    for worker in workers:
        environment = worker.environment
        assert float(environment["QUIRE_WORKER_GPU_MEMORY_UTILIZATION"]) == pytest.approx(share)
        assert int(environment["QUIRE_WORKER_THREADS"]) == 8 // num_workers


def test_what_is_said_goes_before_an_equal_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_WORKER_GPU_MEMORY_UTILIZATION", "0.2")
    [worker] = services(1, {"QUIRE_WORKER_THREADS": "7"}).workers()
    assert worker.environment["QUIRE_WORKER_GPU_MEMORY_UTILIZATION"] == "0.2"
    assert worker.environment["QUIRE_WORKER_THREADS"] == "7"
