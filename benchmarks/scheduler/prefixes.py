"""Hit rate of shared prefixes on several workers, by placement policy."""

from dataclasses import dataclass
from statistics import mean

from benchmarks.report import Cell, Column, Part, Target
from benchmarks.scheduler.fleet import Fleet, FleetSetting
from benchmarks.scheduler.stack import BenchStack, Setting
from benchmarks.scheduler.throughput import BLOCK_SIZE
from benchmarks.scheduler.workload import Workload

_NUM_WORKERS = 4
_NUM_PREFIXES = 64
_PREFIX_TOKENS = 512
_OWN_TOKENS = (16, 48)
_OUTPUT_TOKENS = (16, 48)
# A pool could hold a good third of the prefixes, or half of them, and nothing else.
_BLOCKS_PER_WORKER = (768, 1024)
_ROWS_PER_WORKER = 16
_CONCURRENCY = 32
_TIMEOUT_S = 120.0
_TARGET_HITS = 0.9
_TARGET_PREFILL = 0.6
_NUM_SHARDS = 4
_WORKERS_PER_SHARD = 2
_MOST_LOAD = 1.3
_LARGER = _NUM_SHARDS * _WORKERS_PER_SHARD // _NUM_WORKERS


@dataclass(frozen=True)
class _Case:
    title: str
    num_workers: int
    placement: str
    # The blocks, rows and requests at once of all workers, over those of four.
    size: int = 1


_SUM = _Case("one worker with the sum of the pools", 1, "least_work")
_PLACED = _Case("four workers, placed", _NUM_WORKERS, "least_work")
_SUM_OF_SHARDS = _Case("one worker with the sum of eight pools", 1, "least_work", _LARGER)
_ROUND_ROBIN = _Case("four workers, round robin", _NUM_WORKERS, "round_robin")


def prefixes(num_requests: int) -> Part:
    rows: list[dict[str, Cell]] = []
    targets: list[Target] = []
    for num_blocks in _BLOCKS_PER_WORKER:
        cases = [_row(case, num_blocks, num_requests) for case in (_SUM, _PLACED, _ROUND_ROBIN)]
        of_shards = [
            _row(_SUM_OF_SHARDS, num_blocks, num_requests),
            _row_of_shards(num_blocks, num_requests),
        ]
        rows += [*cases, *of_shards]
        targets += [
            *_targets(num_blocks, *cases),
            *_targets_of_shards(num_blocks, *of_shards),
        ]
    return Part(
        name="prefixes",
        title="Placement by cached prefixes",
        notes=[
            f"{num_requests:,} requests, {_CONCURRENCY} at once; each begins with one of "
            f"{_NUM_PREFIXES} prefixes of {_PREFIX_TOKENS} tokens (Zipf: the one of rank r with a "
            f"share of 1/r) and has {_OWN_TOKENS[0]} to {_OWN_TOKENS[1]} tokens of its own. "
            f"Together the prefixes fill {_NUM_PREFIXES * _PREFIX_TOKENS // BLOCK_SIZE} blocks. "
            "The first use of each prefix, a miss, is counted. In the last two cases "
            f"{_LARGER * _NUM_WORKERS} such workers have {_LARGER * _CONCURRENCY} requests at "
            "once, and the gateway's modules choose the shards. *Load* is the mean number of live "
            "requests of the busiest shard, over that of all.",
        ],
        columns=[
            Column("blocks", "blocks per worker", "d"),
            Column("case", "case"),
            Column("hit_rate", "hit rate", ".3f"),
            Column("prefilled", "tokens prefilled", ",d"),
            Column("seconds", "seconds", ".1f"),
            Column("load", "load", ".2f"),
        ],
        rows=rows,
        targets=targets,
    )


def _row(case: _Case, num_blocks: int, num_requests: int) -> dict[str, Cell]:
    setting = Setting(
        num_workers=case.num_workers,
        model=_model(num_blocks, case.size * _NUM_WORKERS // case.num_workers),
        scheduler={"placement": case.placement},
    )
    with BenchStack(setting) as stack:
        begun_s = stack.progress()["at_s"]
        stack.run(_workload(num_requests, case.size))
        ended_s = stack.wait_for("ended", num_requests, _TIMEOUT_S)["at_s"]
        lanes = stack.probe.call("collect")["lanes"]
        stack.check()
    return {
        "blocks": num_blocks,
        "case": case.title,
        "hit_rate": lanes["num_hit_tokens"] / lanes["num_queried_tokens"],
        "prefilled": lanes["num_queried_tokens"] - lanes["num_hit_tokens"],
        "seconds": ended_s - begun_s,
    }


def _row_of_shards(num_blocks: int, num_requests: int) -> dict[str, Cell]:
    setting = FleetSetting(
        num_workers=_NUM_SHARDS * _WORKERS_PER_SHARD,
        num_shards=_NUM_SHARDS,
        model=_model(num_blocks, 1),
    )
    with Fleet(setting) as fleet:
        begun = fleet.progress()
        fleet.run(_workload(num_requests, _LARGER), is_placed=True)
        ended = fleet.wait_for("ended", num_requests, _TIMEOUT_S)
        workers = [worker for status in fleet.statuses() for worker in status.workers]
        fleet.check()
    num_hit = sum(worker.num_hit_tokens for worker in workers)
    num_queried = sum(worker.num_queried_tokens for worker in workers)
    return {
        "blocks": num_blocks,
        "case": f"{_NUM_SHARDS} shards of {_WORKERS_PER_SHARD} workers",
        "hit_rate": num_hit / num_queried,
        "prefilled": num_queried - num_hit,
        "seconds": ended["at_s"] - begun["at_s"],
        "load": max(ended["live_s"]) / mean(ended["live_s"]),
    }


def _model(num_blocks: int, share: int) -> dict[str, float]:
    """A worker with so many times the rows, blocks and speed of one of four."""
    return {
        "max_model_len": 1024,
        "block_size": BLOCK_SIZE,
        "num_blocks": share * num_blocks + 1,
        "max_num_seqs": share * _ROWS_PER_WORKER,
        # Similar to a small model on a GPU.
        "step_ms": 6.0,
        "token_us": 30.0 / share,
    }


def _workload(num_requests: int, size: int) -> Workload:
    return Workload(
        num_requests=num_requests,
        concurrency=size * _CONCURRENCY,
        prompt_tokens=_OWN_TOKENS,
        output_tokens=_OUTPUT_TOKENS,
        num_prefixes=_NUM_PREFIXES,
        prefix_tokens=_PREFIX_TOKENS,
    )


def _targets_of_shards(
    num_blocks: int, together: dict[str, Cell], sharded: dict[str, Cell]
) -> list[Target]:
    hits, load = _ratio(sharded, together, "hit_rate"), float(sharded["load"] or 0)
    return [
        Target(
            f"hit rate of {_NUM_SHARDS} shards with {num_blocks} blocks over that of one worker "
            "with the sum of the pools",
            f"at least {_TARGET_HITS:g}",
            f"{hits:.3f}",
            hits >= _TARGET_HITS,
        ),
        Target(
            f"load of the busiest of {_NUM_SHARDS} shards with {num_blocks} blocks over the mean",
            f"at most {_MOST_LOAD:g}",
            f"{load:.2f}",
            load <= _MOST_LOAD,
        ),
    ]


def _targets(
    num_blocks: int,
    together: dict[str, Cell],
    placed: dict[str, Cell],
    round_robin: dict[str, Cell],
) -> list[Target]:
    hits = _ratio(placed, together, "hit_rate")
    prefill = _ratio(placed, round_robin, "prefilled")
    return [
        Target(
            f"hit rate with {num_blocks} blocks over that of one worker with the sum of the pools",
            f"at least {_TARGET_HITS:g}",
            f"{hits:.3f}",
            hits >= _TARGET_HITS,
        ),
        Target(
            f"tokens prefilled with {num_blocks} blocks over those of round robin",
            f"at most {_TARGET_PREFILL:g}",
            f"{prefill:.3f}",
            prefill <= _TARGET_PREFILL,
        ),
    ]


def _ratio(one: dict[str, Cell], other: dict[str, Cell], key: str) -> float:
    return float(one[key] or 0) / float(other[key] or 1)
