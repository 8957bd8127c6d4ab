"""Launches that `compiled_kernels` has compiled in a process that does not interpret."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
Launch = dict[str, Any]


def compiled_by(module: str) -> Any:
    """What a module beside this one prints, as JSON."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = f"{_ROOT / 'tests' / 'support'}:{_ROOT}"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def of(launches: list[Launch], kernel: str, **what: str) -> list[Launch]:
    """Those of a kernel with these properties, of which there must be some."""
    found = [
        launch
        for launch in launches
        if launch["kernel"] == kernel
        and all(launch.get(name) == value for name, value in what.items())
    ]
    assert found
    return found


def instructions(launch: Launch, pattern: str) -> int:
    """How often the pattern stands in the code."""
    return len(re.findall(pattern, launch["ptx"]))
