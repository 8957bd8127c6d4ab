"""Several runs as one: outcomes are kept as JSON beside the logs, and added up."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.chaos.comparison import Verdict
from benchmarks.chaos.experiment import Outcome, Recovered
from benchmarks.chaos.gaps import ByShard

_FILE = "outcome.json"


def save(outcome: Outcome, directory: Path) -> None:
    (directory / _FILE).write_text(json.dumps({**asdict(outcome), "decoded": None}) + "\n")


def joined(outcome: Outcome, directories: Sequence[Path]) -> Outcome:
    """Return an outcome and those of earlier runs as one. OSError if a folder has none."""
    for directory in directories:
        outcome = _sum(outcome, _outcome(json.loads((directory / _FILE).read_text())))
    return outcome


def _outcome(saved: Mapping[str, Any]) -> Outcome:
    return Outcome(
        **{
            **saved,
            "by_shard": {name: ByShard(**one) for name, one in saved["by_shard"].items()},
            "recovered": {name: Recovered(**one) for name, one in saved["recovered"].items()},
            "num_wrong": {Verdict(name): count for name, count in saved["num_wrong"].items()},
        }
    )


def _sum(one: Outcome, other: Outcome) -> Outcome:
    return Outcome(
        baseline=one.baseline + other.baseline,
        baseline_first=one.baseline_first + other.baseline_first,
        pauses=_merged(one.pauses, other.pauses, []),
        first_waits=_merged(one.first_waits, other.first_waits, []),
        recoveries=_merged(one.recoveries, other.recoveries, []),
        by_shard=_merged(one.by_shard, other.by_shard, ByShard()),
        recovered=_merged(one.recovered, other.recovered, Recovered()),
        decoded=one.decoded,
        num_requests=one.num_requests + other.num_requests,
        num_cancelled=one.num_cancelled + other.num_cancelled,
        num_tokens=one.num_tokens + other.num_tokens,
        num_wrong=_merged(one.num_wrong, other.num_wrong, 0),
        violations=one.violations + other.violations,
    )


def _merged(one: Mapping[Any, Any], other: Mapping[Any, Any], none: Any) -> dict[Any, Any]:
    """Add values key by key, in the order of the keys."""
    return {key: one.get(key, none) + other.get(key, none) for key in {**one, **other}}
