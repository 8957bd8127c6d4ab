"""`make up`, with scripts in place of Docker and Compose."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Compose writes down its arguments and the version of torch that it is given.
PROGRAMS = {
    "scripts/make-secrets.sh": "#!/bin/sh\n",
    "scripts/choose-images.sh": "#!/bin/sh\necho BASE_IMAGE=a BUILD_IMAGE=b REDIS_IMAGE=c\n",
    "scripts/print-unhealthy-logs.sh": "#!/bin/sh\necho the logs\n",
    "compose": '#!/bin/sh\necho "torch [$TORCH]: $*" >>calls\ntest "$1" != "$FAILING"\n',
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("Makefile", "Dockerfile"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "scripts").mkdir()
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def make_up(checkout: Path, *variables: str, failing: str = "") -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "TORCH"}
    return subprocess.run(
        ["make", "--silent", "up", "COMPOSE=./compose", *variables],
        cwd=checkout,
        env={**inherited, "FAILING": failing},
        capture_output=True,
        text=True,
    )


def calls(checkout: Path) -> list[str]:
    return (checkout / "calls").read_text().splitlines()


def test_the_version_of_torch_is_left_to_compose_which_reads_it_from_its_file(
    checkout: Path,
) -> None:
    assert make_up(checkout).returncode == 0
    assert calls(checkout)[0] == "torch []: up --build --detach"


def test_a_version_of_torch_that_make_is_given_is_passed_on(checkout: Path) -> None:
    assert make_up(checkout, "TORCH=torch==1.2.3").returncode == 0
    assert calls(checkout)[0] == "torch [torch==1.2.3]: up --build --detach"


def test_readiness_is_asked_for_where_it_is_served_without_tls(checkout: Path) -> None:
    assert make_up(checkout).returncode == 0
    asked = [call.partition("exec -T ")[2] for call in calls(checkout) if "exec" in call]
    target = "quire health --target 127.0.0.1:50060"
    assert asked == [f"gateway {target}", f"gateway-2 {target}"]


@pytest.mark.parametrize("failing", ["up", "exec"])
def test_the_logs_are_printed_if_the_service_does_not_start(checkout: Path, failing: str) -> None:
    made = make_up(checkout, "UP_TIMEOUT_S=1", failing=failing)
    assert made.returncode == 2
    assert "the logs" in made.stdout.splitlines()
