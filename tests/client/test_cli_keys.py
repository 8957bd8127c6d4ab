"""`quire keys`."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quire.cli import app
from quire.service.api_keys import hash_key


def test_a_new_key_is_printed_once_with_the_entry_of_its_hash() -> None:
    result = CliRunner().invoke(app, ["keys", "new", "research"])
    assert result.exit_code == 0
    [key] = re.findall(r"quire-[\w-]{43}", result.output)
    assert f'- name: "research"\n  keys: [{hash_key(key).hex()}]' in result.output
    other = CliRunner().invoke(app, ["keys", "new", "research"])
    assert key not in other.output


def test_a_name_that_the_keys_file_refuses_has_no_key() -> None:
    for name in ("a: b", "#x", "", "x" * 65):
        result = CliRunner().invoke(app, ["keys", "new", name])
        assert result.exit_code == 2
        assert "quire-" not in result.output


@pytest.mark.parametrize(
    "arguments", [("keys", "new", "research"), pytest.param(("--help",), marks=pytest.mark.slow)]
)
def test_an_output_that_cannot_be_written_is_reported(arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "quire", *arguments]
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert result.returncode == 1
    assert result.stderr == "quire: [Errno 28] No space left on device\n"
