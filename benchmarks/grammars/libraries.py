"""Compares libraries of grammars on the same schemas, each in a process of its own."""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.grammars.schemas import mixed_schemas
from benchmarks.grammars.vocabulary import train
from benchmarks.report import Column, Part

_ROOT = Path(__file__).resolve().parents[2]
_DEMO = _ROOT / "demo" / "model" / "tokenizer.json"
_LARGE = _ROOT / ".cache" / "grammars" / "byte-level-131072.json"
_NUM_SCHEMAS = 330
_LIBRARIES = ("llguidance", "xgrammar")
_COLUMNS = (
    Column("library", "library"),
    Column("tokens", "tokens", ",d"),
    Column("import_s", "import s", ".2f"),
    Column("torch", "imports torch"),
    Column("vocabulary_s", "vocabulary s", ".2f"),
    Column("compile_p50", "compile ms p50", ".2f"),
    Column("compile_p99", "p99", ".1f"),
    Column("mask_ms", "32 masks ms p50", ".2f"),
    Column("mask_ms_p99", "p99", ".1f"),
    Column("served", "schemas served"),
    Column("wrong", "outputs invalid"),
    Column("suite", "suite served"),
    Column("suite_wrong", "taken wrongly"),
    Column("suite_refused", "refused wrongly"),
    Column("peak_mb", "peak MB", ".0f"),
)


def libraries(python: str, suite: Path | None) -> Part:
    """`python` has both libraries; `suite` is a folder of JSON-Schema-Test-Suite's dialect."""
    if not _LARGE.exists():
        train(131_072, _LARGE)
    schemas = mixed_schemas(_NUM_SCHEMAS)
    groups = [] if suite is None else list(_suite_groups(suite))
    rows = []
    for tokenizer in (_DEMO, _LARGE):
        for library in _LIBRARIES:
            work = {"tokenizer": str(tokenizer), "schemas": schemas, "groups": groups}
            measured = _measure(python, library, work)
            rows.append(_row(library, measured, tokenizer))
    return Part(
        name="libraries",
        title="Libraries of grammars",
        notes=_notes(schemas, groups),
        columns=_COLUMNS,
        rows=rows,
        targets=(),
    )


def _measure(python: str, library: str, work: Mapping[str, Any]) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(work, file)
        file.flush()
        done = subprocess.run(
            [python, "-m", "benchmarks.grammars.child", library, file.name],
            cwd=_ROOT,
            env={**os.environ, "PYTHONPATH": str(_ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=True,
        )
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured


def _row(library: str, measured: Mapping[str, Any], tokenizer: Path) -> dict[str, Any]:
    compile_ms, suite = measured["compile_ms"], measured["suite"]
    num_served = len(compile_ms)
    num_finished = measured["valid"] + len(measured["wrong"])
    return {
        "library": f"{library} {measured['version']}",
        "tokens": len(json.loads(tokenizer.read_text())["model"]["vocab"]),
        "import_s": measured["import_s"],
        "torch": "yes" if measured["imports_torch"] else "no",
        "vocabulary_s": measured["vocabulary_s"],
        "compile_p50": median(compile_ms),
        "compile_p99": float(np.percentile(compile_ms, 99)),
        "mask_ms": measured["mask_ms"],
        "mask_ms_p99": measured["mask_ms_p99"],
        "served": f"{num_served} of {num_served + len(measured['refusals'])}",
        "wrong": f"{len(measured['wrong'])} of {num_finished}",
        "suite": f"{suite['served']} of {suite['groups']}",
        "suite_wrong": str(suite["accepted_wrongly"]),
        "suite_refused": f"{suite['refused_wrongly']} of {suite['tests']}",
        "peak_mb": measured["peak_mb"],
    }


def _notes(schemas: Sequence[Any], groups: Sequence[Any]) -> list[str]:
    return [
        f"{len(schemas)} schemas of 33 kinds, six of which grammars hardly express "
        "(`benchmarks/grammars/schemas.py`). *Outputs invalid*: of documents of random tokens that "
        "the masks allow, one per schema that is served, those that `jsonschema` refuses. *32 "
        "masks*: of rows with different schemas, after their first tokens. Times are those of the "
        "processor, of all threads together.",
        f"*Suite*: {len(groups)} groups of JSON-Schema-Test-Suite (2020-12, without optional and "
        "remote ones). *Taken wrongly*: invalid instances that the grammar accepts. *Refused "
        "wrongly*: valid ones that it does not, mostly because of the order of properties.",
    ]


def _suite_groups(folder: Path) -> Iterator[Mapping[str, Any]]:
    """The groups of one dialect's folder that need no other documents."""
    for path in sorted(folder.glob("*.json")):
        if path.stem not in ("refRemote", "vocabulary", "dynamicRef"):
            yield from json.loads(path.read_text())
