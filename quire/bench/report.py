"""What a load gave, in numbers."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from quire.bench.objectives import Objectives
from quire.bench.spread import Spread
from quire.bench.trace import Trace


@dataclass(frozen=True)
class Report:
    """One server under one load. Times are seconds; failed requests count in no latency."""

    server: str
    num_requests: int
    # How often each error came.
    errors: dict[str, int]
    # From the first arrival to the last end.
    duration_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    # Requests by the second that met every objective; None without one.
    goodput_per_s: float | None
    # To the first token, between messages with tokens, per token behind the first, to the end.
    ttft: Spread | None
    itl: Spread | None
    tpot: Spread | None
    e2el: Spread | None
    # How far behind its own times the load was. Where that is much, the figures are the load's.
    late: Spread | None

    @property
    def num_failed(self) -> int:
        return sum(self.errors.values())

    @classmethod
    def of(cls, server: str, traces: Sequence[Trace], objectives: Objectives) -> Self:
        done = [trace for trace in traces if trace.is_complete]
        duration_s = max((trace.ended_s for trace in traces), default=0.0)
        num_prompt_tokens = sum(trace.num_prompt_tokens for trace in done)
        num_output_tokens = sum(trace.num_output_tokens for trace in done)
        num_good = sum(map(objectives.met_by, traces))
        return cls(
            server=server,
            num_requests=len(traces),
            errors=dict(Counter(trace.error for trace in traces if trace.error is not None)),
            duration_s=duration_s,
            num_prompt_tokens=num_prompt_tokens,
            num_output_tokens=num_output_tokens,
            requests_per_s=_rate(len(done), duration_s),
            output_tokens_per_s=_rate(num_output_tokens, duration_s),
            total_tokens_per_s=_rate(num_prompt_tokens + num_output_tokens, duration_s),
            goodput_per_s=_rate(num_good, duration_s) if objectives.are_set else None,
            ttft=Spread.of(_known(trace.first_token_s for trace in done)),
            itl=Spread.of(gap for trace in done for gap in trace.gaps_s),
            tpot=Spread.of(_known(trace.per_output_token_s for trace in done)),
            e2el=Spread.of(trace.latency_s for trace in done),
            late=Spread.of(trace.late_s for trace in traces),
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def _known(values: Iterable[float | None]) -> Iterator[float]:
    return (value for value in values if value is not None)
