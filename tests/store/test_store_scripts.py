"""The header of each script, its body and its declaration say the same."""

import re
from pathlib import Path

import pytest

from scheduler_svc.store import scripts
from scheduler_svc.store.keys import PoolKeys
from scheduler_svc.store.packing import pack_commit
from scheduler_svc.store.scripts import SCRIPTS, Script
from scheduler_svc.store.types import Commit

FOLDER = Path(scripts.__file__).parent
LIBRARIES = {"blocks", "fencing", "free", "records", "sequences"}


def named(script: Script, section: str) -> tuple[str, ...]:
    """The names of a section's lines `--   NUMBER NAME  what it is`, numbered from 1."""
    text = re.search(rf"^-- {section}\b.*\n((?:--  .*\n)*)", script.header + "\n", re.MULTILINE)
    assert text, f"{script.name}.lua has no {section}"
    lines = re.findall(r"^--  ? ?(\d+) (\S+)", text[1], re.MULTILINE)
    assert [int(number) for number, _ in lines] == list(range(1, len(lines) + 1))
    return tuple(name for _, name in lines)


def test_every_file_is_declared() -> None:
    assert {path.stem for path in FOLDER.glob("*.lua")} == {s.name for s in SCRIPTS} | LIBRARIES


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_header_and_declaration_agree(script: Script) -> None:
    assert script.header.startswith(f"-- {script.name}: ")
    assert named(script, "KEYS") == script.keys
    assert named(script, "ARGV") == script.args
    assert "-- RETURN " in script.header
    assert "-- Atomic" in script.header


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_body_reads_no_more_than_its_header_names(script: Script) -> None:
    for table, names in (("KEYS", script.keys), ("ARGV", script.args)):
        read = [int(number) for number in re.findall(rf"\b{table}\[(\d+)\]", script.body)]
        assert max(read, default=0) <= len(names)


def test_commit_is_called_with_what_it_declares() -> None:
    assert 3 + len(pack_commit(Commit(1))) == len(scripts.COMMIT.args)
    keys = PoolKeys(1)
    assert tuple(getattr(keys, name) for name in scripts.COMMIT.keys) == keys.all
    assert tuple(getattr(keys, name) for name in scripts.MATCH.keys) == keys.blocks
