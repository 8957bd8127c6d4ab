"""The worker's OpenMP settings, made before torch is imported."""

import os

import pytest

from worker_svc.service import process


@pytest.mark.parametrize(
    ("given", "spin_count"),
    [
        ({}, "100"),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "active"}, None),
    ],
)
def test_openmp_sleeps_unless_the_environment_is_set(
    given: dict[str, str], spin_count: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "prepare_memory", lambda: None)
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        # Registered with monkeypatch, which removes what is set here.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    process.prepare_process()
    assert os.environ.get("GOMP_SPINCOUNT") == spin_count
