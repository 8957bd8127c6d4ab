"""One load on several servers, one after the other."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

from quire.arguments import UINT32_MAX, check_integer
from quire.bench.arrivals import Arrival, arrival_times
from quire.bench.equality import Equality, equality
from quire.bench.load import Listener, run_load
from quire.bench.objectives import Objectives
from quire.bench.report import Report
from quire.bench.server import RequestFailed, Server
from quire.bench.trace import Trace
from quire.bench.workload import BenchRequest, Workload

# Watches a load, given the server's name, for as long as its context lasts.
Watch = Callable[[str, int], AbstractContextManager[Listener]]


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is sent, when, and what is aimed at."""

    workload: Workload
    rate_per_s: float
    arrival: Arrival
    max_concurrency: int | None
    num_warmups: int
    objectives: Objectives

    def __post_init__(self) -> None:
        check_integer("max_concurrency", self.max_concurrency, UINT32_MAX, minimum=1)
        check_integer("warmups", self.num_warmups, UINT32_MAX)


@dataclass(frozen=True)
class Outcome:
    """What became of a load."""

    load: Load
    reports: list[Report]
    # Of the first two servers' outputs; None of one, or where a server does not tell its tokens.
    equality: Equality | None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        load, workload = self.load, self.load.workload
        return {
            "workload": {
                "num_requests": workload.num_requests,
                "prompt_lengths": str(workload.prompt_lengths),
                "output_lengths": str(workload.output_lengths),
                "token_ids": [workload.token_ids.start, workload.token_ids.stop],
                "max_model_len": workload.max_model_len,
                "shared_prefix": workload.shared_prefix,
                "seed": workload.seed,
            },
            "request_rate": str(load.rate_per_s),
            "arrival": load.arrival,
            "max_concurrency": load.max_concurrency,
            "objectives_ms": asdict(load.objectives),
            "servers": [report.as_dict() for report in self.reports],
            "equality": self.equality and asdict(self.equality),
        }


async def run(load: Load, servers: Sequence[Server], watch: Watch) -> Outcome:
    """RequestFailed if a server fails the requests that go ahead of the others."""
    reports, outputs = [], []
    for server in servers:
        traces = await _measure(load, server, watch)
        reports.append(Report.of(server.name, traces, load.objectives))
        outputs.append([trace.token_ids for trace in traces])
    equal = equality(outputs[0], outputs[1]) if len(outputs) > 1 else None
    return Outcome(load, reports, equal)


async def _measure(load: Load, server: Server, watch: Watch) -> list[Trace]:
    workload = load.workload
    requests = workload.requests()
    for request in requests[: load.num_warmups]:
        # Not of its prompt: the prefix cache would know it when it is measured.
        [trace] = await run_load(server, [_reversed(request)], [0.0])
        if trace.error is not None:
            raise RequestFailed(f"{server.name}: {trace.error}")
    times_s = arrival_times(len(requests), load.rate_per_s, load.arrival, workload.seed)
    with watch(server.name, len(requests)) as listener:
        return await run_load(
            server, requests, times_s, max_concurrency=load.max_concurrency, on_change=listener
        )


def _reversed(request: BenchRequest) -> BenchRequest:
    return BenchRequest(request.prompt_token_ids[::-1], request.max_tokens)
