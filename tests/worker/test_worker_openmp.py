"""What the worker settles before torch is there."""

import os

import pytest

from worker_svc import process


@pytest.mark.parametrize(
    ("given", "looks"),
    [
        ({}, "100"),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "active"}, None),
    ],
)
def test_openmp_sleeps_unless_somebody_said_otherwise(
    given: dict[str, str], looks: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "prepare_memory", lambda: None)
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        # Registered, so that what is set here goes again.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    process.prepare_process()
    assert os.environ.get("GOMP_SPINCOUNT") == looks
