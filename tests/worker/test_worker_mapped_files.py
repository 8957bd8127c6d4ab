"""Pages of mapped checkpoints: released when their weights are packed, unless they changed."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import llama, save_model
from worker_driver import worker_settings

from worker_svc.loading.runner_loading import load_runner
from worker_svc.model.mapped_files import MappedFiles

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

_NUM_WEIGHTS = 2**20


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.arange(_NUM_WEIGHTS, dtype=torch.float32)}, path)
    return path


def resident_bytes(file: Path) -> int:
    """Of the file's mappings in this process."""
    is_of_file, total = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            is_of_file = line.endswith(str(file))
        elif is_of_file and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def test_pages_are_released_and_can_be_read_again(file: Path) -> None:
    weight = load_file(file)["weight"]
    before = weight.sum()
    assert resident_bytes(file) >= weight.nbytes
    assert MappedFiles([file]).release() >= weight.nbytes
    assert resident_bytes(file) == 0
    assert weight.sum() == before


def test_pages_that_were_changed_are_kept(file: Path) -> None:
    weight = load_file(file)["weight"]
    weight[0] = 7
    assert MappedFiles([file]).release() == 0
    assert weight[0] == 7


def test_other_files_are_kept(file: Path, tmp_path: Path) -> None:
    weight = load_file(file)["weight"]
    weight.sum()
    assert MappedFiles([tmp_path / "another.safetensors"]).release() == 0
    assert resident_bytes(file) >= weight.nbytes


def test_pages_are_released_now_and_then(file: Path) -> None:
    weight = load_file(file)["weight"]
    weight.sum()
    files = MappedFiles([file])
    files.converted(2**20)
    assert resident_bytes(file) >= weight.nbytes
    files.converted(2**27)
    assert resident_bytes(file) == 0


def test_no_checkpoint_is_mapped_by_a_worker_that_is_ready(tmp_path: Path) -> None:
    model = save_model(llama(), tmp_path)
    loaded = load_runner(worker_settings(model, device="cpu"))
    mapped = Path("/proc/self/maps").read_text()
    assert str(next(model.glob("*.safetensors"))) not in mapped
    del loaded
