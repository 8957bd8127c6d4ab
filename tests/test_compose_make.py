"""`make up`, `make down`, and commands of the documentation, with scripts in place of Docker."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

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
    return make(checkout, "up", *variables, failing=failing)


def make(
    checkout: Path, target: str, *variables: str, failing: str = ""
) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "TORCH"}
    return subprocess.run(
        ["make", "--silent", target, "COMPOSE=./compose", *variables],
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


def test_down_removes_the_containers_of_all_profiles(checkout: Path) -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"].values()
    profiles = sorted({name for service in services for name in service.get("profiles", [])})
    assert make(checkout, "down").returncode == 0
    [call] = calls(checkout)
    options = " ".join(f"--profile {name}" for name in profiles)
    assert call.endswith(f": {options} down --volumes --remove-orphans")


# A container is healthy when it is asked about for the third time.
DOCKER = """#!/bin/sh
case "$1 $2" in
  "compose up") for service; do :; done; echo "up $service" >>calls; echo 0 >asked ;;
  "compose ps") for service; do :; done; echo "id-of-$service" ;;
  inspect*)
    for id; do :; done; echo "inspect $id" >>calls; echo 1 >>asked
    if [ "$(wc -l <asked)" -gt 3 ]; then echo healthy; else echo starting; fi ;;
esac
"""


def test_services_are_replaced_one_after_another_when_they_are_healthy(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "containers.md").read_text()
    [loop] = re.findall(r"^(for service in .+?^done)$", page, re.MULTILINE | re.DOTALL)
    for name, text in {"docker": DOCKER, "sleep": "#!/bin/sh\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["sh", "-ec", loop], cwd=tmp_path, env=env, check=True, timeout=30)
    services = ["redis", "scheduler-2", "scheduler", "gateway", "gateway-2"]
    expected = [[f"up {name}", *3 * [f"inspect id-of-{name}"]] for name in services]
    assert calls(tmp_path) == [call for of_service in expected for call in of_service]
