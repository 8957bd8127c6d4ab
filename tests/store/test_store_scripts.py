"""The header of each script agrees with its body."""

import re
from pathlib import Path

import pytest

from scheduler_svc.store import scripts
from scheduler_svc.store.keys import ShardKeys
from scheduler_svc.store.packing import pack_commit
from scheduler_svc.store.scripts import SCRIPTS, Script
from scheduler_svc.store.types import Commit

KEYS = ShardKeys(0)

FOLDER = Path(scripts.__file__).parent / "lua"
LIBRARIES = {"blocks", "fencing", "free", "records", "sequences", "slot"}


def named(script: Script, section: str) -> list[str]:
    """The names of a section's lines `--   NUMBER NAME  description`, numbered from 1."""
    text = re.search(rf"^-- {section}\b.*\n((?:--  .*\n)*)", script.header + "\n", re.MULTILINE)
    assert text, f"{script.name}.lua has no {section}"
    lines = re.findall(r"^--  ? ?(\d+) (\S+)", text[1], re.MULTILINE)
    assert [int(number) for number, _ in lines] == list(range(1, len(lines) + 1))
    return [name for _, name in lines]


def test_every_file_is_declared() -> None:
    files = {path.relative_to(FOLDER) for path in FOLDER.rglob("*.lua")}
    libraries = {path for path in files if path.parts[0] == "lib"}
    assert files - libraries == {Path(s.folder, f"{s.name}.lua") for s in SCRIPTS}
    assert {path.stem for path in FOLDER.glob("lib/*.lua")} == LIBRARIES


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_header_is_complete(script: Script) -> None:
    assert script.header.startswith(f"-- {script.name}: ")
    assert "-- RETURN " in script.header
    assert "-- Atomic" in script.header


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_body_reads_no_more_than_its_header_names(script: Script) -> None:
    for section in ("KEYS", "ARGV"):
        read = [int(number) for number in re.findall(rf"\b{section}\[(\d+)\]", script.body)]
        assert max(read, default=0) <= len(named(script, section))


def test_commit_is_called_with_what_its_header_names() -> None:
    assert 3 + len(pack_commit(Commit(1))) == len(named(scripts.COMMIT, "ARGV"))
    keys = KEYS.pool(1)
    for script, passed in ((scripts.COMMIT, keys.all), (scripts.MATCH_PREFIXES, keys.blocks)):
        assert tuple(getattr(keys, name) for name in named(script, "KEYS")) == passed
