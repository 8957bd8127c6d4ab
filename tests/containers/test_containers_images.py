"""Contents of the images."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from compose_project import ROOT, docker

pytestmark = [pytest.mark.containers, pytest.mark.timeout(1500)]

SERVICES = ("gateway", "scheduler", "worker")
LARGEST_ADDITION = 150_000_000
COMPILERS = ("cc", "gcc", "g++", "c++", "clang", "nvcc", "ld", "make", "pip", "pip3")


def python(image: str, code: str) -> str:
    return docker("run", "--rm", "--entrypoint", "python", image, "-c", code)


def inspected(image: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(docker("inspect", image))[0]
    return facts


def num_bytes(image: str) -> int:
    """Return the size of all layers."""
    sizes = docker("history", "--human=false", "--format", "{{.Size}}", image)
    return sum(map(int, sizes.split()))


@pytest.mark.parametrize("service", ["gateway", "scheduler"])
def test_gateway_and_scheduler_have_no_torch(images: dict[str, str], service: str) -> None:
    code = (
        "from importlib.util import find_spec as find;"
        f"print([bool(find(name)) for name in ('{service}_svc', 'torch', 'transformers')])"
    )
    assert python(images[service], code) == "[True, False, False]"


@pytest.mark.parametrize("service", ["gateway", "scheduler"])
def test_gateway_and_scheduler_add_at_most_150_mb_to_their_base(
    images: dict[str, str], base_image: str, service: str
) -> None:
    assert 0 < num_bytes(images[service]) - num_bytes(base_image) <= LARGEST_ADDITION


@pytest.mark.parametrize("service", SERVICES)
def test_images_run_without_root_and_compilers(images: dict[str, str], service: str) -> None:
    code = (
        "import os, shutil;"
        f"print(os.getuid(), [name for name in {COMPILERS} if shutil.which(name)])"
    )
    assert python(images[service], code) == "10001 []"


@pytest.mark.parametrize("service", SERVICES)
def test_images_declare_stop_signal_and_health_check(images: dict[str, str], service: str) -> None:
    config = inspected(images[service])["Config"]
    assert config["StopSignal"] == "SIGTERM"
    # Checks only the process; compose checks its dependencies.
    probe = ["python", "-m", "quire.probe", "127.0.0.1:50060", ""]
    assert config["Healthcheck"]["Test"] == ["CMD", *probe]


def test_a_change_of_code_is_one_layer(
    images: dict[str, str], base_image: str, build_image: str, tmp_path: Path
) -> None:
    """Dependencies, which take minutes, are not installed again."""
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    for name in files.stdout.splitlines():
        if (ROOT / name).is_file() and not name.startswith("demo/model"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    with (tmp_path / "gateway_svc" / "__main__.py").open("a") as module:
        module.write("# changed\n")
    arguments = [f"--build-arg=BASE_IMAGE={base_image}", f"--build-arg=BUILD_IMAGE={build_image}"]
    tag = "quire-test-gateway:changed"
    docker("build", "--quiet", "--target=gateway", f"--tag={tag}", *arguments, str(tmp_path))
    before, after = (inspected(i)["RootFS"]["Layers"] for i in (images["gateway"], tag))
    docker("rmi", tag)
    assert after[:-1] == before[:-1]
    assert after[-1] != before[-1]
