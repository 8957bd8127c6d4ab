"""What a worker reports while it downloads and loads a model."""

import os
import subprocess
import sys
from io import StringIO
from pathlib import Path

from scripted_hub import HUB_MODEL, serve_hub
from structlog.testing import capture_logs
from tiny_models import llama, save_model
from worker_driver import worker_settings

from quire.service.progress_file import Progress, read_progress
from worker_svc.loading.runner_loading import load_runner
from worker_svc.model.load_progress import LoadProgress

_MIB = 2**20


def test_details_are_written_at_intervals_and_logged_rarely(tmp_path: Path) -> None:
    file, time_s = tmp_path / "progress", [100.0]
    progress = LoadProgress(file, clock=lambda: time_s[0])
    assert read_progress(file) is None
    with capture_logs() as logs:
        progress.count_bytes("downloading", 0, 4 * _MIB)
        assert read_progress(file) == Progress("downloading")
        progress.count_bytes("downloading", _MIB, 4 * _MIB)
        assert read_progress(file) == Progress("downloading")
        time_s[0] += 0.125
        progress.count_bytes("downloading", 2 * _MIB, 4 * _MIB)
        assert read_progress(file) == Progress("downloading", "2 MiB of 4 MiB, 0 s")
        time_s[0] += 10.0
        progress.count_bytes("downloading", 3 * _MIB, 4 * _MIB)
        progress.count_layers("packing weights", 1, 7, 0, 4 * _MIB)
        time_s[0] += 3.0
        progress.count_layers("packing weights", 2, 7, _MIB, 4 * _MIB)
        progress.end()
    detail = "layer 2 of 7, 1 MiB of 4 MiB"
    assert read_progress(file) == Progress("packing weights", f"{detail}, 13 s")
    assert [{k: v for k, v in line.items() if k != "log_level"} for line in logs] == [
        {"event": "loading", "step": "downloading", "seconds": 0.0},
        {"event": "loading", "step": "downloading", "done": "3 MiB of 4 MiB", "seconds": 10.1},
        {"event": "loading", "step": "packing weights", "seconds": 10.1},
        {"event": "loading", "step": "packing weights", "done": detail, "seconds": 13.1},
        {"event": "loaded", "seconds": 13.1},
    ]


def test_a_terminal_has_one_line_that_is_rewritten() -> None:
    terminal, time_s = StringIO(), [0.0]
    progress = LoadProgress(clock=lambda: time_s[0], terminal=terminal)
    with capture_logs():
        progress.begin("reading")
        for layer in (1, 2):
            time_s[0] += 1.0
            progress.count_layers("packing", layer, 2, layer * _MIB, 2 * _MIB)
        time_s[0] += 1.0
        progress.count_layers("packing", 2, 2, 2 * _MIB, 2 * _MIB)
        progress.end()
    text = terminal.getvalue()
    assert "\n" not in text
    lines = [line for line in text.split("\r\x1b[K") if line]
    assert lines == [
        "reading",
        "packing",
        "packing, layer 2 of 2, 2 MiB of 2 MiB, 2 s",
        "packing, layer 2 of 2, 2 MiB of 2 MiB, 3 s",
    ]
    assert text.endswith("\r\x1b[K")


def test_a_model_is_loaded_without_a_place_for_the_file(tmp_path: Path) -> None:
    LoadProgress(tmp_path / "none" / "progress").begin("downloading")


def test_the_steps_of_loading_a_model(tmp_path: Path) -> None:
    model, file = save_model(llama(), tmp_path), tmp_path / "progress"
    with capture_logs() as logs:
        load_runner(worker_settings(model, device="cpu", progress_file=file))
    steps = [line["step"] for line in logs if line["event"] == "loading"]
    assert steps[0].startswith("reading ")
    assert steps[0].endswith(" of weights")
    assert steps[-2:] == ["allocating the cache", "warming up"]
    assert read_progress(file) == Progress("warming up")


def test_a_download_reports_its_bytes(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / "config.json").write_text("{}")
    (repository / "model.safetensors").write_bytes(bytes(3 * _MIB))
    script = f"""
from worker_svc.model.download import download
print(download({HUB_MODEL!r}, None, ["*.safetensors"], lambda *n: print(*n, flush=True)))
"""
    with serve_hub(repository) as hub:
        environment = {
            **os.environ,
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "cache"),
            "HF_HUB_DISABLE_XET": "1",
        }
        run = subprocess.run(
            [sys.executable, "-c", script],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
    *counts, folder = run.stdout.splitlines()
    assert counts[-1] == f"{3 * _MIB} {3 * _MIB}"
    assert [file.name for file in Path(folder).iterdir()] == ["model.safetensors"]
    assert run.stderr == ""
