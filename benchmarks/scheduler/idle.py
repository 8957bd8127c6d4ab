"""What a fleet costs without requests: by processes, shards and workers."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from benchmarks.report import Cell, Column, Part
from benchmarks.scheduler.fleet import Counters, Fleet, FleetSetting, Sizes

_WINDOW_S = 8.0
_PAUSE_S = 3.0
_WORKERS_PER_HOST = 64
# Blocks of a pool. Free and cached blocks have entries in Redis.
NUM_BLOCKS = 4096
_MODEL = {
    "max_model_len": 1024,
    "block_size": 16,
    "num_blocks": NUM_BLOCKS,
    "max_num_seqs": 16,
    "step_ms": 100.0,
}
# Per second, and at one moment.
RATES = ("scheduler_s", "redis_s", "workers_s", "redis_calls", "redis_commands", "redis_bytes")
SIZES = ("redis_keys", "redis_bytes_stored", "redis_connections", "sockets", "rss_mb")
PROCESS, SHARD, WORKER, PAIR = "a scheduler", "a shard", "a worker", "a scheduler, per shard"
KINDS = (PROCESS, SHARD, WORKER, PAIR)


@dataclass(frozen=True)
class Fleets:
    """One of the measured fleets."""

    num_schedulers: int
    num_shards: int
    num_workers: int


FLEETS = (
    Fleets(1, 1, 16),
    Fleets(1, 8, 16),
    Fleets(4, 8, 16),
    Fleets(1, 8, 64),
    Fleets(4, 32, 64),
    Fleets(1, 64, 64),
    Fleets(8, 64, 64),
)


def idle(cases: Sequence[Fleets], window_s: float = _WINDOW_S) -> Part:
    rows = [_row(case, window_s) for case in cases]
    return Part(
        name="idle",
        title="A fleet without requests",
        notes=[
            "What is used per second while nothing runs: leases, heartbeats, lookups of workers, "
            "states of the shards. The last rows are what one more scheduler, shard or worker "
            "adds, and what a scheduler adds per shard of all, because each reads the states of "
            "all: by least squares over the rows above them. Pools have "
            f"{NUM_BLOCKS:,} blocks. *Cores* are processor time per second. Sockets and memory are "
            "those of the schedulers together.",
        ],
        columns=[
            Column("what", "fleet"),
            Column("scheduler_s", "cores: schedulers", ".4f"),
            Column("redis_s", "Redis", ".4f"),
            Column("workers_s", "workers", ".4f"),
            Column("redis_calls", "Redis calls/s", ".1f"),
            Column("redis_commands", "commands/s", ".1f"),
            Column("redis_bytes", "bytes/s", ",.0f"),
            Column("redis_keys", "keys", ".1f"),
            Column("redis_bytes_stored", "bytes stored", ",.0f"),
            Column("redis_connections", "connections", ".1f"),
            Column("sockets", "sockets", ".1f"),
            Column("rss_mb", "peak MB", ".1f"),
        ],
        rows=[*rows, *fitted(rows)],
        targets=[],
    )


def fitted(rows: Sequence[dict[str, Cell]]) -> list[dict[str, Cell]]:
    """What one of each of `KINDS` adds to each figure, at least 0."""
    counts = np.array([_counts(row) for row in rows])
    found: list[dict[str, Cell]] = [{"what": what} for what in KINDS]
    for key in (*RATES, *SIZES):
        values = np.array([float(row.get(key) or 0) for row in rows])
        for one, amount in zip(found, _solve(counts, values), strict=True):
            one[key] = float(amount)
    return found


def _counts(row: dict[str, Cell]) -> list[float]:
    kinds = ("num_schedulers", "num_shards", "num_workers")
    schedulers, shards, workers = (float(row[kind] or 0) for kind in kinds)
    return [schedulers, shards, workers, schedulers * shards]


def _solve(counts: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Least squares with no negative amounts: kinds that would have one are left out."""
    used = list(range(counts.shape[1]))
    amounts = np.zeros(counts.shape[1])
    while used:
        solved = np.linalg.lstsq(counts[:, used], values, rcond=None)[0]
        if (solved >= 0).all():
            amounts[used] = solved
            break
        used.pop(int(solved.argmin()))
    return amounts


def _row(case: Fleets, window_s: float) -> dict[str, Cell]:
    setting = FleetSetting(
        num_workers=case.num_workers,
        num_shards=case.num_shards,
        num_schedulers=case.num_schedulers,
        model=_MODEL,
        workers_per_host=_WORKERS_PER_HOST,
    )
    with Fleet(setting) as fleet:
        time.sleep(_PAUSE_S)
        before = fleet.counters()
        time.sleep(window_s)
        used = fleet.counters() - before
        sizes = fleet.sizes()
        fleet.check()
    return {
        "what": f"{case.num_schedulers} schedulers, {case.num_shards} shards, "
        f"{case.num_workers} workers",
        **asdict(case),
        **rates(used),
        **sizes_of(sizes),
    }


def rates(used: Counters) -> dict[str, Cell]:
    return {key: getattr(used, key) / used.at_s for key in RATES}


def sizes_of(sizes: Sizes) -> dict[str, Cell]:
    return {
        "redis_keys": sizes.redis_keys,
        "redis_bytes_stored": sizes.redis_bytes,
        "redis_connections": sizes.redis_connections,
        "sockets": sizes.scheduler_sockets,
        "rss_mb": sizes.scheduler_rss_mb,
    }
