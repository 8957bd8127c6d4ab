"""`quire pull` from a hub on loopback."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripted_hub import HUB_MODEL, Hub, serve_hub


@pytest.fixture
def hub(tmp_path) -> Iterator[Hub]:
    folder = tmp_path / "repository"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"):
        (folder / name).write_text(f"{name}\n" * 100)
    for name in ("pytorch_model.bin", "README.md"):
        (folder / name).write_text("not needed")
    with serve_hub(folder) as hub:
        yield hub


def pull(tmp_path: Path, endpoint: str, *arguments: str, **environment: str):
    command = [sys.executable, "-m", "quire", "pull", *arguments]
    variables = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "cache")}
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **variables, "HF_HUB_DISABLE_XET": "1", **environment},
    )


@pytest.mark.slow
def test_the_files_of_all_services_are_downloaded_once(hub, tmp_path):
    result = pull(tmp_path, hub.url, HUB_MODEL)
    # Without a terminal there are no progress bars.
    assert (result.returncode, result.stderr) == (0, "")
    folder = Path(result.stdout.rstrip())
    expected = {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
    assert {file.name for file in folder.iterdir()} == expected
    assert sorted(hub.downloads) == sorted(expected)
    assert pull(tmp_path, hub.url, HUB_MODEL).stdout == result.stdout
    assert len(hub.downloads) == len(expected)
    # Also without the hub.
    assert pull(tmp_path, "http://127.0.0.1:1", HUB_MODEL).stdout == result.stdout


@pytest.mark.slow
def test_without_a_network_the_error_is_one_line_with_the_reason(tmp_path):
    result = pull(tmp_path, "http://127.0.0.1:1", HUB_MODEL)
    assert (result.returncode, result.stdout) == (1, "")
    [line] = result.stderr.splitlines()
    assert line.startswith(f"quire: {HUB_MODEL}: not available from the hub: ")
    assert "Connection refused" in line


@pytest.mark.slow
def test_offline_mode_is_named(tmp_path):
    result = pull(tmp_path, "http://127.0.0.1:1", HUB_MODEL, HF_HUB_OFFLINE="1")
    [line] = result.stderr.splitlines()
    assert "HF_HUB_OFFLINE" in line


def test_an_unknown_model_is_named(hub, tmp_path):
    result = pull(tmp_path, hub.url, "test/other")
    assert result.returncode == 1
    [line] = result.stderr.splitlines()
    assert line.startswith("quire: test/other: not available from the hub: ")


def test_a_model_without_weights_that_can_be_served_is_refused(hub, tmp_path):
    (hub.folder / "model.safetensors").unlink()
    result = pull(tmp_path, hub.url, HUB_MODEL)
    assert result.returncode == 1
    assert result.stderr == f"quire: {HUB_MODEL}: the hub has no *.safetensors file of it\n"


def test_a_folder_is_not_downloaded(tmp_path):
    result = pull(tmp_path, "http://127.0.0.1:1", str(tmp_path))
    assert result.returncode == 1
    assert "a folder of this name exists" in result.stderr
