"""Memory, start-up time and idle time of the worker."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.engines.models import BenchModel
from benchmarks.report import Cell, Column, Part, Target

_MB = 1e6
# Beyond weights and pool: the interpreter, torch, activations.
_MOST_OVERHEAD_MB = 600.0
_MOST_READY_S = 10.0
_MOST_IDLE_SHARE = 0.02


def worker(
    model: BenchModel, results: Sequence[Mapping[str, Any]], ready_s: float, peak_rss_mb: float
) -> Part:
    """Build the table. `results` are Quire's results of all rounds."""
    weights_mb, pool_mb = model.weight_bytes / _MB, model.kv_cache_bytes / _MB
    most_mb = weights_mb + pool_mb + _MOST_OVERHEAD_MB
    idle_share = median(_share(result, "idle_s") for result in results)
    starting_share = median(_share(result, "starting_s") for result in results)
    row: dict[str, Cell] = {
        "peak_rss_mb": peak_rss_mb,
        "weights_mb": weights_mb,
        "pool_mb": pool_mb,
        "beside_mb": peak_rss_mb - weights_mb - pool_mb,
        "ready_s": ready_s,
        "idle_share": idle_share,
        "starting_share": starting_share,
    }
    return Part(
        name=f"worker-{model.name}",
        title=f"The worker, {model.size}",
        notes=[
            "The peak resident memory during the rounds above (10^6 bytes), and its part beyond "
            "weights and pool. *Ready* is the time from the start of the whole stack, including "
            "Redis, to readiness. *Idle* is the share of the worker's time between the end of a "
            "step and the start of the next, from the first step of the work to the last; *with a "
            "plan* is the part in which the next plan had already arrived."
        ],
        columns=_COLUMNS,
        rows=[row],
        targets=[
            Target(
                "peak resident size",
                f"at most {most_mb:.0f} MB, weights + pool + {_MOST_OVERHEAD_MB:.0f}",
                f"{peak_rss_mb:.0f} MB",
                peak_rss_mb <= most_mb,
            ),
            Target(
                "ready", f"under {_MOST_READY_S:g} s", f"{ready_s:.1f} s", ready_s < _MOST_READY_S
            ),
            Target(
                "idle with a plan",
                f"under {_MOST_IDLE_SHARE:.0%}",
                f"{starting_share:.2%}",
                starting_share < _MOST_IDLE_SHARE,
            ),
        ],
    )


_COLUMNS = [
    Column("peak_rss_mb", "peak resident MB", ".0f"),
    Column("weights_mb", "weights", ".0f"),
    Column("pool_mb", "pool", ".0f"),
    Column("beside_mb", "other", ".0f"),
    Column("ready_s", "ready s", ".1f"),
    Column("idle_share", "idle", ".2%"),
    Column("starting_share", "with a plan", ".2%"),
]


def _share(result: Mapping[str, Any], key: str) -> float:
    """Return a time as a share of the worker's idle and busy time."""
    return float(result[key] / (result["idle_s"] + result["busy_s"]))
