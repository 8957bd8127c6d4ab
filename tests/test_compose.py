"""The compose file's limits and secrets, without a Docker engine."""

import os
import re
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())[
    "services"
]

each_service = pytest.mark.parametrize("name", SERVICES)


@each_service
def test_every_container_is_limited_and_has_no_privileges(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert set(service["logging"]["options"]) == {"max-size", "max-file"}
    assert re.fullmatch(r"\$\{[A-Z]+_MEMORY:-\d+g\}", service["mem_limit"])
    assert re.fullmatch(r"\$\{[A-Z]+_CPUS:-0\}", service["cpus"])
    # Compose 1.29 refuses a variable here.
    assert isinstance(service["pids_limit"], int)


def test_ports_are_published_on_loopback_unless_a_variable_says_otherwise() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    name = r"(?:QUIRE_(?:HTTP_)?PORT(?:_2)?|PROMETHEUS_PORT|GRAFANA_PORT)"
    hosts = re.findall(rf"\$\{{{name}:-127\.0\.0\.1:(\d+)\}}", " ".join(ports))
    assert len(ports) == len(set(hosts)) == 6


@pytest.mark.parametrize("file", ["docker-compose.yml", "docker-compose.tls.yml"])
def test_redis_has_its_append_only_file_alone(file: str) -> None:
    redis = yaml.safe_load((ROOT / file).read_text())["services"]["redis"]
    lines = redis["command"][2].splitlines()
    # After a snapshot that failed Redis would refuse writes.
    assert {"appendonly yes", 'save ""'} <= set(lines)


@pytest.mark.parametrize("name", ["gateway", "gateway-2"])
def test_a_gateway_is_stopped_before_the_workers_that_serve_its_requests(name: str) -> None:
    assert {"scheduler", "scheduler-2", "worker"} <= SERVICES[name]["depends_on"].keys()


def test_the_worker_of_ranks_is_another_worker() -> None:
    ranks, worker = SERVICES["worker-ranks"], SERVICES["worker"]
    assert ranks["profiles"] == ["ranks"]
    # By which schedulers find it.
    assert ranks["networks"]["default"]["aliases"] == ["worker"]
    size = {"QUIRE_WORKER_TENSOR_PARALLEL_SIZE": "2"}
    assert ranks["environment"] == worker["environment"] | size
    assert {**worker, **ranks} == ranks


def test_make_installs_the_torch_that_the_images_have() -> None:
    pinned = re.findall(r"^ARG PINNED_TORCH=(.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    rule = "--eval=torch:;@echo '$(TORCH)'"
    environment = {name: value for name, value in os.environ.items() if name != "TORCH"}
    made = subprocess.run(
        ["make", "--silent", rule, "torch"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert [made.stdout.strip()] == pinned
    assert re.fullmatch(r"torch==[\d.]+", pinned[0])
    files = [*ROOT.glob("*"), *(ROOT / "scripts").iterdir()]
    pins = [f for f in files if f.is_file() and re.search(r"torch==\d", f.read_text())]
    assert [file.name for file in pins] == ["Dockerfile"]


def make_secrets(file: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "REDIS_PASSWORD_FILE": str(file)}
    return subprocess.run(
        [ROOT / "scripts" / "make-secrets.sh"], env=environment, capture_output=True, text=True
    )


def test_a_password_is_made_once_in_a_folder_of_its_owner(tmp_path: Path) -> None:
    file = tmp_path / "secrets" / "redis-password"
    assert make_secrets(file).returncode == 0
    password = file.read_text()
    assert re.fullmatch(r"[0-9a-f]{64}\n", password)
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    # Redis and the scheduler read it as other users.
    assert stat.S_IMODE(file.stat().st_mode) == 0o444
    assert make_secrets(file).returncode == 0
    assert file.read_text() == password


def test_no_password_is_made_where_other_users_could_read_it(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    made = make_secrets(tmp_path / "open" / "redis-password")
    assert made.returncode == 1
    assert "chmod 700" in made.stderr
    assert list((tmp_path / "open").iterdir()) == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('REDIS_PASSWORD_FILE="of redis/pw" # the file', "of redis/pw"),
        ("REDIS_PASSWORD_FILE='of redis/pw'", "of redis/pw"),
        ("export REDIS_PASSWORD_FILE = kept/pw # the file", "kept/pw"),
        ("REDIS_PASSWORD_FILE=kept/pw\r", "kept/pw"),
        ("REDIS_PASSWORD_FILE=~/kept/pw", "home/kept/pw"),
        ("REDIS_PASSWORD_FILE=", "secrets/redis-password"),
    ],
)
def test_the_password_is_where_compose_looks_for_it(
    tmp_path: Path, line: str, expected: str
) -> None:
    (tmp_path / "scripts").mkdir()
    script = shutil.copy(ROOT / "scripts" / "make-secrets.sh", tmp_path / "scripts")
    (tmp_path / ".env").write_text(line + "\n", newline="")
    environment = {k: v for k, v in os.environ.items() if k != "REDIS_PASSWORD_FILE"}
    subprocess.run([script], env=environment | {"HOME": str(tmp_path / "home")}, check=True)
    assert (tmp_path / expected).is_file()


def test_a_folder_is_no_password(tmp_path: Path) -> None:
    made = make_secrets(tmp_path)
    assert made.returncode == 1
    assert f"{tmp_path} is a folder" in made.stderr
