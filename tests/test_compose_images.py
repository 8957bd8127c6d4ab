"""Base images that `make up` chooses, and the lines of .env by which Compose uses them, too.

Docker is a script here that has some images and can pull others.
"""

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
DOCKER = """#!/bin/sh
case "$1" in
  image) for image; do :; done; grep -qxF "$image" images ;;
  pull) grep -qxF "$3" registry && echo "$3" >>images ;;
esac
"""
DEFAULTS = {
    "BASE_IMAGE": "python:3.11-slim",
    "BUILD_IMAGE": "python:3.11-slim",
    "REDIS_IMAGE": "redis:7",
}
LOCAL = {
    "BASE_IMAGE": "quire-base:local",
    "BUILD_IMAGE": "quire-build:local",
    "REDIS_IMAGE": "quire-base:local",
}


class Checkout:
    """A folder with the script, without an image, and with an unavailable registry."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = folder / ".env"
        (folder / "scripts").mkdir()
        shutil.copy(ROOT / "scripts" / "choose-images.sh", folder / "scripts")
        for name in ("make-base-image.sh", "make-build-image.sh"):
            self.add_program(f"scripts/{name}", "#!/bin/sh\n")
        self.add_program("bin/docker", DOCKER)
        self.set_registry()
        (folder / "images").touch()

    def set_registry(self, *images: str) -> None:
        (self.folder / "registry").write_text("".join(f"{image}\n" for image in images))

    def choose(self, *arguments: str, **environment: str) -> dict[str, str]:
        inherited = {name: v for name, v in os.environ.items() if not name.endswith("_IMAGE")}
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        done = subprocess.run(
            ["scripts/choose-images.sh", *arguments],
            cwd=self.folder,
            env={**inherited, "PATH": path, **environment},
            capture_output=True,
            text=True,
            check=True,
        )
        return dict(assignment.split("=", 1) for assignment in done.stdout.split())

    def saved(self) -> dict[str, str]:
        """The variables of .env as Compose reads them: the last value counts."""
        lines = self.env.read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def add_program(self, name: str, text: str) -> None:
        program = self.folder / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(text)
        program.chmod(0o755)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_local_images_are_saved_for_compose(checkout: Checkout) -> None:
    assert checkout.choose("--save") == LOCAL
    assert checkout.saved() == LOCAL
    # Other users may run Compose, and the file has no secret.
    assert stat.S_IMODE(checkout.env.stat().st_mode) == 0o644
    assert not list(checkout.folder.glob(".env.*"))


def test_nothing_is_saved_if_it_is_not_asked_for_or_not_needed(checkout: Checkout) -> None:
    assert checkout.choose() == LOCAL
    checkout.set_registry(*DEFAULTS.values())
    assert checkout.choose("--save") == DEFAULTS
    assert not checkout.env.exists()


def test_other_lines_of_the_file_are_kept(checkout: Checkout) -> None:
    own = "# mine\nHF_TOKEN=secret\n\nREDIS_IMAGE='redis:8'\nQUIRE_MODEL=a/b"
    checkout.env.write_text(own)
    checkout.env.chmod(0o600)
    for _ in range(2):
        checkout.choose("--save")
        assert checkout.env.read_text().startswith(f"{own}\n# Written by `make up`")
        assert checkout.env.read_text().count("BASE_IMAGE=") == 1
    assert checkout.saved().items() >= {**LOCAL, "HF_TOKEN": "secret"}.items()
    assert stat.S_IMODE(checkout.env.stat().st_mode) == 0o600

    # The user's own choice counts again once it can be pulled, and the lines are removed.
    checkout.set_registry("python:3.11-slim", "redis:8")
    assert checkout.choose("--save") == {**DEFAULTS, "REDIS_IMAGE": "redis:8"}
    assert checkout.env.read_text() == f"{own}\n"


def test_lines_after_a_damaged_end_are_kept(checkout: Checkout) -> None:
    checkout.choose("--save")
    without_end = checkout.env.read_text().rpartition("# End")[0]
    checkout.env.write_text(f"{without_end}HF_TOKEN=secret\n")
    checkout.choose("--save")
    assert checkout.saved() == {**LOCAL, "HF_TOKEN": "secret"}
    assert checkout.env.read_text().count("BASE_IMAGE=") == 1


def test_a_link_stays_a_link(checkout: Checkout) -> None:
    elsewhere = checkout.folder / "elsewhere"
    elsewhere.write_text("QUIRE_TAG=1\n")
    checkout.env.symlink_to(elsewhere)
    checkout.choose("--save")
    assert checkout.env.is_symlink()
    assert checkout.saved() == {**LOCAL, "QUIRE_TAG": "1"}


def test_images_of_the_environment_are_for_one_call(checkout: Checkout) -> None:
    checkout.choose("--save")
    before = checkout.env.read_text()
    checkout.set_registry("mine:1", "redis:7")
    chosen = checkout.choose("--save", BASE_IMAGE="mine:1", BUILD_IMAGE="mine:1")
    assert chosen == {"BASE_IMAGE": "mine:1", "BUILD_IMAGE": "mine:1", "REDIS_IMAGE": "redis:7"}
    # Redis' image is that of Compose again; the other lines were not the call's to change.
    assert checkout.saved() == {name: LOCAL[name] for name in ("BASE_IMAGE", "BUILD_IMAGE")}
    checkout.set_registry()
    checkout.choose("--save")
    assert checkout.env.read_text() == before


def test_the_image_of_the_build_follows_that_of_the_services(checkout: Checkout) -> None:
    checkout.env.write_text("BASE_IMAGE=mine:1\n")
    checkout.set_registry("mine:1", "redis:7")
    assert checkout.choose("--save")["BUILD_IMAGE"] == "mine:1"
    # By itself, Compose would build in its own default.
    assert checkout.saved() == {"BASE_IMAGE": "mine:1", "BUILD_IMAGE": "mine:1"}


def test_a_local_image_has_the_torch_of_the_file(checkout: Checkout) -> None:
    checkout.add_program("scripts/make-build-image.sh", '#!/bin/sh\necho "$TORCH" >torch\n')
    checkout.env.write_text("TORCH=torch==1.2.3\n")
    assert checkout.choose(TORCH="") == LOCAL
    assert (checkout.folder / "torch").read_text() == "torch==1.2.3\n"


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="Compose is not installed")
def test_compose_reads_the_saved_images(checkout: Checkout) -> None:
    shutil.copy(ROOT / "docker-compose.yml", checkout.folder)
    checkout.choose("--save")
    environment = {name: v for name, v in os.environ.items() if not name.endswith("_IMAGE")}
    rendered = subprocess.run(
        ["docker-compose", "--profile", "observability", "config"],
        cwd=checkout.folder,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    services = yaml.safe_load(rendered.stdout)["services"]
    assert {"prometheus", "grafana"} <= services.keys()
    assert services["redis"]["image"] == LOCAL["REDIS_IMAGE"]
    built_with = services["worker"]["build"]["args"]
    assert [built_with[name] for name in LOCAL if name in built_with] == [
        "quire-base:local",
        "quire-build:local",
    ]


@pytest.mark.parametrize("workers", ["", "three"])
def test_scaling_needs_a_number_of_workers(workers: str) -> None:
    made = run_scale(workers)
    assert made.returncode == 2
    assert "make scale WORKERS=3" in made.stdout


def test_scaling_keeps_running_containers() -> None:
    made = run_scale("3")
    assert made.stdout.split() == [
        *("up", "--detach", "--no-recreate", "--scale", "worker=3"),
    ]


def run_scale(workers: str) -> subprocess.CompletedProcess[str]:
    """Run `make scale` with a command for Compose that prints its arguments."""
    return subprocess.run(
        ["make", "--silent", "scale", f"WORKERS={workers}", "COMPOSE=@echo", "UP_ARGS="],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
