"""Results of a load: latencies, throughput, goodput, equality of outputs."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import fmean
from typing import Self

from quire.bench.objectives import ServiceLevelObjectives
from quire.bench.request_timings import RequestTimings
from quire.client.decode_counts import DecodeCounts


@dataclass(frozen=True)
class LatencySummary:
    """Mean, percentiles and maximum of latencies in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Self | None:
        """Summarise the values that are not None; None if there are none."""
        ordered = sorted(value for value in values if value is not None)
        if not ordered:
            return None
        return cls(
            mean=fmean(ordered),
            p50=percentile(ordered, 50),
            p90=percentile(ordered, 90),
            p99=percentile(ordered, 99),
            max=ordered[-1],
        )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The percentile of an ascending, non-empty sequence, interpolated as by `numpy.percentile`."""
    rank = (len(ordered) - 1) * percent / 100
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


@dataclass(frozen=True)
class Report:
    """The result of one server. Times are in seconds; latencies omit failed requests."""

    server: str
    num_requests: int
    # Number of occurrences of each error.
    errors: dict[str, int]
    # From the first arrival to the last end.
    duration_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    # Requests per second that were within all objectives; None without an objective.
    goodput_per_s: float | None
    # Time to first token, inter-token latency, time per output token, end-to-end latency.
    ttft: LatencySummary | None
    itl: LatencySummary | None
    tpot: LatencySummary | None
    e2el: LatencySummary | None
    # Delay of the load generator. If it is large, the load generator limits the results.
    late: LatencySummary | None
    # Tokens that a row gained in a step, and the share of drafts that were accepted, during the
    # load; None if that is not known, or without drafts.
    tokens_per_step: float | None = None
    draft_acceptance: float | None = None

    @property
    def num_failed(self) -> int:
        return sum(self.errors.values())

    @classmethod
    def of(
        cls,
        server: str,
        timings: Sequence[RequestTimings],
        objectives: ServiceLevelObjectives,
        decoded: DecodeCounts | None = None,
    ) -> Self:
        """`decoded` is what the server's workers have decoded during the load, if known."""
        done = [request for request in timings if request.is_complete]
        duration_s = max((request.ended_s for request in timings), default=0.0)
        num_prompt_tokens = sum(request.num_prompt_tokens for request in done)
        num_output_tokens = sum(request.num_output_tokens for request in done)
        num_good = sum(map(objectives.met_by, timings))
        return cls(
            server=server,
            num_requests=len(timings),
            errors=dict(Counter(request.error for request in timings if request.error is not None)),
            duration_s=duration_s,
            num_prompt_tokens=num_prompt_tokens,
            num_output_tokens=num_output_tokens,
            requests_per_s=_rate(len(done), duration_s),
            output_tokens_per_s=_rate(num_output_tokens, duration_s),
            total_tokens_per_s=_rate(num_prompt_tokens + num_output_tokens, duration_s),
            goodput_per_s=_rate(num_good, duration_s) if objectives.are_set else None,
            ttft=LatencySummary.of(request.first_token_s for request in done),
            itl=LatencySummary.of(gap for request in done for gap in request.gaps_s),
            tpot=LatencySummary.of(request.per_output_token_s for request in done),
            e2el=LatencySummary.of(request.latency_s for request in done),
            late=LatencySummary.of(request.late_s for request in timings),
            tokens_per_step=None if decoded is None else decoded.tokens_per_step,
            draft_acceptance=None if decoded is None else decoded.acceptance,
        )


@dataclass(frozen=True)
class Equality:
    """Agreement of two servers' outputs for the same requests."""

    # Share of the tokens before the first difference of each output.
    tokens: float
    # Share of the requests with equal outputs.
    requests: float


def equality(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> Equality | None:
    """Compare outputs token by token; None if a server reports no tokens.

    ValueError for different numbers of outputs.
    """
    pairs = list(zip(ours, theirs, strict=True))
    num_tokens = sum(max(len(one), len(other)) for one, other in pairs)
    if not any(ours) or not any(theirs):
        return None
    num_equal = sum(_common_prefix_length(one, other) for one, other in pairs)
    num_same = sum(list(one) == list(other) for one, other in pairs)
    return Equality(num_equal / num_tokens, num_same / len(pairs))


def _common_prefix_length(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
