"""Latencies of the streaming APIs of Quire's gateway and vLLM's server under the same loads."""

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

from benchmarks.engines.models import BenchModel
from benchmarks.engines.workload import workload
from benchmarks.report import Cell, Column, Part, Target
from quire.bench.load import Listener
from quire.bench.objectives import ServiceLevelObjectives
from quire.bench.openai_server import OpenAIServer
from quire.bench.quire_server import QuireServer
from quire.bench.report import Report
from quire.bench.run import LoadResult, LoadSpec, run
from quire.bench.server import Server

_MS_PER_S = 1000
_NUM_ALONE = 6
QUIRE, VLLM = "Quire", "vLLM's server"


@dataclass(frozen=True)
class Addresses:
    """Addresses of the servers; None without the server."""

    quire: str
    vllm: str | None

    def servers(self) -> dict[str, Server]:
        """Create the clients. To be called in the event loop that uses them."""
        ours: dict[str, Server] = {QUIRE: QuireServer(self.quire, None, 0.0, True)}
        if self.vllm is None:
            return ours
        return {**ours, VLLM: OpenAIServer(self.vllm, "bench", 0.0, True, None)}


def loads(model: BenchModel, num_requests: int, num_rounds: int) -> dict[str, list[LoadSpec]]:
    """Return the loads of all rounds by their names in the table. No prompt occurs twice, because
    it would hit the prefix caches."""
    kinds = {
        f"{model.request_rate:g} per second": (num_requests, model.request_rate, None),
        "all at once": (num_requests, math.inf, None),
        "one at a time": (_NUM_ALONE, math.inf, 1),
    }
    return {
        kind: [_load(*kind_of, seed=1 + at * num_rounds + i) for i in range(num_rounds)]
        for at, (kind, kind_of) in enumerate(kinds.items())
    }


def _load(num_requests: int, rate: float, max_concurrency: int | None, seed: int) -> LoadSpec:
    return LoadSpec(
        workload=workload(num_requests, seed),
        rate_per_s=rate,
        arrival="poisson",
        max_concurrency=max_concurrency,
        num_warmups=1,
        objectives=ServiceLevelObjectives(),
    )


def measure(
    addresses: Addresses, wanted: Mapping[str, list[LoadSpec]]
) -> dict[str, list[LoadResult]]:
    """Run each round on every server before the next."""
    return {
        kind: [asyncio.run(_result(addresses, load)) for load in rounds]
        for kind, rounds in wanted.items()
    }


async def _result(addresses: Addresses, load: LoadSpec) -> LoadResult:
    servers = addresses.servers()
    try:
        return await run(load, list(servers.values()), _unwatched)
    finally:
        for server in servers.values():
            await server.close()


@contextmanager
def _unwatched(_server: str, _num_requests: int) -> Iterator[Listener]:
    yield lambda _: None


def latency(model: BenchModel, results: Mapping[str, Sequence[LoadResult]]) -> Part:
    rows = [row for kind, rounds in results.items() for row in _rows(kind, rounds)]
    num_rounds = len(next(iter(results.values())))
    return Part(
        name=f"latency-{model.name}",
        title=f"Latencies, {model.size}",
        notes=[
            "Streams of the same requests, through the gateway and through vLLM's OpenAI server; "
            "arrivals are Poisson's, and latencies count from them. Milliseconds, medians of the "
            f"rounds ({num_rounds}). *Inter-token* is the time between messages with tokens."
        ],
        columns=_COLUMNS,
        rows=rows,
        targets=list(_targets(next(iter(results)), rows)),
    )


_COLUMNS = [
    Column("load", "load"),
    Column("server", "server"),
    Column("tokens_per_s", "output tokens/s", ",.0f"),
    Column("ttft_p50", "time to first token p50", ",.0f"),
    Column("ttft_p99", "p99", ",.0f"),
    Column("itl_p50", "inter-token p50", ",.1f"),
    Column("itl_p99", "p99", ",.1f"),
    Column("e2el_p50", "end to end p50", ",.0f"),
    Column("e2el_p99", "p99", ",.0f"),
    Column("equal", "equal tokens", ".1%"),
    Column("failed", "failed", "d"),
]
_AIMS = {
    "ttft_p50": "time to first token, p50",
    "ttft_p99": "time to first token, p99",
    "itl_p50": "inter-token latency, p50",
    "itl_p99": "inter-token latency, p99",
}


def _rows(kind: str, rounds: Sequence[LoadResult]) -> Iterator[dict[str, Cell]]:
    num_servers = len(rounds[0].reports)
    for at, server in enumerate((QUIRE, VLLM)[:num_servers]):
        reports = [result.reports[at] for result in rounds]
        equal = [result.equality.tokens for result in rounds if result.equality is not None]
        yield {
            "load": kind,
            "server": server,
            "tokens_per_s": median(report.output_tokens_per_s for report in reports),
            **_latencies(reports),
            "equal": min(equal) if equal and at else None,
            "failed": sum(report.num_failed for report in reports),
        }


def _latencies(reports: Sequence[Report]) -> dict[str, Cell]:
    return {
        f"{name}_{percent}": _median_ms(reports, name, percent)
        for name in ("ttft", "itl", "e2el")
        for percent in ("p50", "p99")
    }


def _median_ms(reports: Sequence[Report], name: str, percent: str) -> float | None:
    spreads = [getattr(report, name) for report in reports]
    known = [getattr(spread, percent) for spread in spreads if spread is not None]
    return _MS_PER_S * median(known) if known else None


def _targets(kind: str, rows: Sequence[Mapping[str, Cell]]) -> Iterator[Target]:
    """Yield the targets: Quire's latencies at most vLLM's, if vLLM was measured."""
    by_server = {row["server"]: row for row in rows if row["load"] == kind}
    if VLLM not in by_server:
        return
    for key, what in _AIMS.items():
        ours, theirs = by_server[QUIRE][key], by_server[VLLM][key]
        if isinstance(ours, float) and isinstance(theirs, float):
            yield Target(
                f"{what}, at {kind}", f"at most {theirs:.1f} ms", f"{ours:.1f} ms", ours <= theirs
            )
