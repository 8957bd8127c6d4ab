"""What the documents say of the code is what the code says of itself."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gateway_svc.settings import GatewaySettings
from quire.service.settings import ServiceSettings
from scheduler_svc.settings import SchedulerSettings
from worker_svc.settings import WorkerSettings

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted(
    path for folder in (ROOT, ROOT / "docs") if folder.is_dir() for path in folder.glob("*.md")
)


def test_readme_has_the_table_of_every_setting() -> None:
    table = subprocess.run(
        [sys.executable, "scripts/settings_table.py"],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert table.count("\n| ") > 20
    assert table in (ROOT / "README.md").read_text(), "run scripts/settings_table.py --write"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_within_the_repository_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_make_targets_that_are_named_exist(document: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"`make ([a-z-]+)", document.read_text()))
    assert named - set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE)) == set()


def test_compose_variables_are_all_in_the_example_environment() -> None:
    compose = (ROOT / "docker-compose.yml").read_text()
    example = (ROOT / ".env.example").read_text()
    used = set(re.findall(r"\$\{([A-Z_]+)", compose))
    assert used == set(re.findall(r"^([A-Z_]+)=", example, re.MULTILINE))


def test_the_example_environment_shows_the_defaults_of_compose() -> None:
    compose = (ROOT / "docker-compose.yml").read_text()
    example = dict(
        re.findall(r"^([A-Z_]+)=(.*)$", (ROOT / ".env.example").read_text(), re.MULTILINE)
    )
    used = set(re.findall(r"\$\{([A-Z_]+):?-([^}]*)\}", compose))
    assert used == set(example.items())


@pytest.mark.parametrize("settings", [GatewaySettings, SchedulerSettings, WorkerSettings])
def test_compose_passes_every_setting_on(settings: type[ServiceSettings]) -> None:
    """But where to listen, which is the image's, and a file that nobody there would read."""
    prefix = settings.model_config["env_prefix"]
    names = {prefix + name.upper() for name in settings.model_fields}
    passed_on = set(
        re.findall(r"^ +(QUIRE_[A-Z_]+):", (ROOT / "docker-compose.yml").read_text(), re.MULTILINE)
    )
    assert names - passed_on == {f"{prefix}LISTEN", f"{prefix}ADDRESS_FILE"}
