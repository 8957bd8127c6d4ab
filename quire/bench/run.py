"""Runs one load on several servers, one after another."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

from quire.bench.load import Listener, run_load
from quire.bench.objectives import ServiceLevelObjectives
from quire.bench.report import Equality, Report, equality
from quire.bench.request_timings import RequestTimings
from quire.bench.server import RequestFailed, Server
from quire.bench.workload import Arrival, BenchRequest, Workload, arrival_times
from quire.client.arguments import UINT32_MAX, check_integer
from quire.client.decode_counts import DecodeCounts

# Shows the progress of a load within a context, given the server's name and the requests' number.
ShowProgress = Callable[[str, int], AbstractContextManager[Listener]]


@dataclass(frozen=True, kw_only=True)
class LoadSpec:
    """Requests, their arrival process and limits, and the objectives."""

    workload: Workload
    rate_per_s: float
    arrival: Arrival
    max_concurrency: int | None
    num_warmups: int
    objectives: ServiceLevelObjectives

    def __post_init__(self) -> None:
        check_integer("max_concurrency", self.max_concurrency, UINT32_MAX, minimum=1)
        check_integer("warmups", self.num_warmups, UINT32_MAX)


@dataclass(frozen=True)
class LoadResult:
    """The results of a load."""

    load: LoadSpec
    reports: list[Report]
    # Of the first two servers' outputs; None with one server, or if a server returns no tokens.
    equality: Equality | None

    def as_dict(self) -> dict[str, Any]:
        """Convert the result for JSON."""
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
            "servers": [asdict(report) for report in self.reports],
            "equality": self.equality and asdict(self.equality),
        }


async def run(load: LoadSpec, servers: Sequence[Server], show_progress: ShowProgress) -> LoadResult:
    """Measure each server. RequestFailed if a warm-up request fails."""
    reports, outputs = [], []
    for server in servers:
        timings, decoded = await _measure(load, server, show_progress)
        reports.append(Report.of(server.name, timings, load.objectives, decoded))
        outputs.append([request.token_ids for request in timings])
    equal = equality(outputs[0], outputs[1]) if len(outputs) > 1 else None
    return LoadResult(load, reports, equal)


async def _measure(
    load: LoadSpec, server: Server, show_progress: ShowProgress
) -> tuple[list[RequestTimings], DecodeCounts | None]:
    """The requests, and what the server's workers have decoded meanwhile."""
    workload = load.workload
    requests = workload.requests()
    for request in requests[: load.num_warmups]:
        # Reversed, so that the measured prompt is not in the prefix cache.
        warmup = BenchRequest(request.prompt_token_ids[::-1], request.max_tokens)
        [measured] = await run_load(server, [warmup], [0.0])
        if measured.error is not None:
            raise RequestFailed(f"{server.name}: {measured.error}")
    times_s = arrival_times(len(requests), load.rate_per_s, load.arrival, workload.seed)
    before = await server.decode_counts()
    with show_progress(server.name, len(requests)) as listener:
        timings = await run_load(
            server, requests, times_s, max_concurrency=load.max_concurrency, on_change=listener
        )
    try:
        after = await server.decode_counts()
    except RequestFailed:
        # The requests were measured all the same.
        after = None
    return timings, None if before is None or after is None else after.since(before)
