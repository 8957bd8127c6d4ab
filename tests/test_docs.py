"""Documents agree with the code, and their links resolve."""

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.chaos.faults import FAULTS
from gateway_svc.settings import GatewaySettings
from quire.service.settings import ServiceSettings
from scheduler_svc.settings import SchedulerSettings
from worker_svc.settings import WorkerSettings

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/*.md", "demo/*.md", "protos/*.md")
    for path in ROOT.glob(pattern)
)
FOLDERS = (
    *("quire", "gateway_svc", "scheduler_svc", "worker_svc", "kernels", "protos"),
    *("tests", "scripts", "benchmarks", "demo", "docs"),
)
MOST_LINES = {"README.md": 200, "ARCHITECTURE.md": 250}

each_document = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix()
)


@pytest.mark.parametrize(
    ("script", "page", "num_rows"), [("settings_table", "settings", 20), ("api_table", "api", 60)]
)
def test_a_generated_table_is_that_of_the_code(script: str, page: str, num_rows: int) -> None:
    table = subprocess.run(
        [sys.executable, f"scripts/{script}.py"],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert table.count("\n| ") > num_rows
    text = (ROOT / "docs" / f"{page}.md").read_text()
    assert table in text, f"run scripts/{script}.py --write"


def test_links_within_the_reference_of_the_protos_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
    reference = importlib.import_module("build_docs").protos_reference()
    links = set(re.findall(r"\]\(#(\w+)\)", reference))
    assert "generaterequest" in links
    assert links <= {name.lower() for name in re.findall(r"^### (\w+)$", reference, re.MULTILINE)}


@each_document
def test_internal_links_resolve(document: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []


@each_document
def test_anchors_are_headings(document: Path) -> None:
    anchors = re.findall(r"\]\(([^)#:]*)#([^)]*)\)", document.read_text())
    assert [
        f"{link}#{anchor}"
        for link, anchor in anchors
        if anchor not in _anchors(document.parent / link if link else document)
    ] == []


def _anchors(document: Path) -> Iterator[str]:
    """The anchors of a page's headings, as GitHub makes them of headings that are unique."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        yield re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


@each_document
def test_files_and_folders_that_are_named_exist(document: Path) -> None:
    named = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]*)`", document.read_text())
    generated = {"quire/v1", "quire/internal/v1"}
    assert [name for name in named if not (ROOT / name).exists() and name not in generated] == []


def test_names_occur_in_the_files_that_are_named_with_them() -> None:
    """As `Quotas.excess` (`scheduler_svc/core/quotas.py`), or with "in" or "of" between them."""
    file = rf"`((?:{'|'.join(FOLDERS)})/[\w./-]+\.\w+)`"
    named = re.compile(rf"`([\w.]+)(?:\(\))?`(?:\s+\(|\s+in\s+|\s+of\s+){file}")
    found = [
        (document.name, *match.groups())
        for document in DOCUMENTS
        for match in named.finditer(document.read_text())
    ]
    assert len(found) > 20
    wrong = [
        (document, name, path)
        for document, name, path in found
        if name.rpartition(".")[2] not in (ROOT / path).read_text()
    ]
    assert wrong == []


@each_document
def test_make_targets_that_are_named_exist(document: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"`make ([a-z-]+)", document.read_text()))
    assert named - set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE)) == set()


@pytest.mark.parametrize("name", MOST_LINES)
def test_the_first_pages_are_short(name: str) -> None:
    assert len((ROOT / name).read_text().splitlines()) <= MOST_LINES[name]


def test_the_metrics_page_has_every_metric() -> None:
    sources = (
        "scheduler_svc/operations/collector.py",
        "scheduler_svc/operations/tenant_metrics.py",
        "gateway_svc/metrics/request_metrics.py",
        "quire/service/metrics/server.py",
    )
    code = "".join((ROOT / source).read_text() for source in sources)
    exported = set(re.findall(r'"(quire:\w+)"', code))
    page = (ROOT / "docs" / "metrics.md").read_text()
    documented = set(re.findall(r"^\| `(quire:\w+)`", page, re.MULTILINE))
    # Prometheus appends the suffix to the name of a counter.
    assert {name.removesuffix("_total") for name in documented} == {
        name.removesuffix("_total") for name in exported
    }


def test_the_page_of_chaos_tests_has_every_fault() -> None:
    page = (ROOT / "docs" / "chaos.md").read_text()
    documented = re.findall(r"^\| `([\w-]+)` \|", page, re.MULTILINE)
    assert sorted(documented) == sorted(fault.name for fault in FAULTS)


def test_the_index_of_decisions_lists_every_record() -> None:
    folder = ROOT / "docs" / "decisions"
    listed = re.findall(
        r"^\| \[\d{4}\]\(([^)]+)\)", (folder / "README.md").read_text(), re.MULTILINE
    )
    assert listed == sorted(path.name for path in folder.glob("[0-9]*.md"))


def test_the_navigation_of_the_site_has_every_page() -> None:
    site = set(re.findall(r"[\w./-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    pages = {path.relative_to(ROOT).as_posix() for path in DOCUMENTS}
    generated = {"index.md", "reference/python.md", "reference/protos.md"}
    assert site == pages - {"README.md", "demo/README.md"} | generated


def test_compose_variables_are_all_in_the_example_environment() -> None:
    compose = (ROOT / "docker-compose.yml").read_text()
    example = (ROOT / ".env.example").read_text()
    used = set(re.findall(r"\$\{([A-Z0-9_]+)", compose))
    assert used == set(re.findall(r"^([A-Z0-9_]+)=", example, re.MULTILINE))


def test_the_example_environment_shows_the_defaults_of_compose() -> None:
    compose = (ROOT / "docker-compose.yml").read_text()
    example = dict(
        re.findall(r"^([A-Z0-9_]+)=(.*)$", (ROOT / ".env.example").read_text(), re.MULTILINE)
    )
    used = set(re.findall(r"\$\{([A-Z0-9_]+):?-([^}]*)\}", compose))
    assert used == set(example.items())


@pytest.mark.parametrize("settings", [GatewaySettings, SchedulerSettings, WorkerSettings])
def test_compose_passes_every_setting_on(settings: type[ServiceSettings]) -> None:
    """Except the addresses, which the image sets, and their files, which have no reader there."""
    prefix = settings.model_config["env_prefix"]
    names = {prefix + name.upper() for name in settings.model_fields}
    files = "".join(
        (ROOT / name).read_text() for name in ("docker-compose.yml", "docker-compose.tls.yml")
    )
    passed_on = set(re.findall(r"^ +(QUIRE_[A-Z0-9_]+):", files, re.MULTILINE))
    own = {
        *("LISTEN", "ADDRESS_FILE", "HTTP_LISTEN", "HTTP_ADDRESS_FILE"),
        *("HEALTH_LISTEN", "PROGRESS_FILE"),
    }
    assert names - passed_on == {f"{prefix}{name}" for name in own} & names
