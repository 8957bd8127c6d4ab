"""Injects each fault once under load: nothing is lost, and nothing is left behind."""

from pathlib import Path

import pytest

from benchmarks.chaos.__main__ import main

_ARGUMENTS = ("--times=1", "--requests=32", "--bound-s=45")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_fault_loses_anything(tmp_path: Path) -> None:
    assert main([*_ARGUMENTS, "--seed=1", f"--logs={tmp_path}"]) == 0
