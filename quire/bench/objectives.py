"""Service level objectives (SLOs), which define goodput."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from quire.bench.request_timings import RequestTimings

_NAMES = ("ttft", "tpot", "e2el")
FORM = f"NAME:MILLISECONDS with a NAME of {', '.join(_NAMES)}"


@dataclass(frozen=True)
class ServiceLevelObjectives:
    """Limits in milliseconds, named as in vLLM's benchmark; None is no limit."""

    # Time to first token.
    ttft: float | None = None
    # Time per output token.
    tpot: float | None = None
    # End-to-end latency.
    e2el: float | None = None

    @property
    def are_set(self) -> bool:
        return self != ServiceLevelObjectives()

    def met_by(self, timings: RequestTimings) -> bool:
        """Whether a request completed within all limits."""
        return timings.is_complete and all(
            _within(limit_ms, seconds)
            for limit_ms, seconds in (
                (self.ttft, timings.first_token_s),
                (self.tpot, timings.per_output_token_s),
                (self.e2el, timings.latency_s),
            )
        )


def objectives(forms: Iterable[str]) -> ServiceLevelObjectives:
    """Parse limits such as `ttft:200`. ValueError, with the text, for others."""
    limits: dict[str, float] = {}
    for form in forms:
        name, _, text = form.partition(":")
        limit = _number(text)
        if name not in _NAMES or not limit > 0:
            raise ValueError(f"goodput: expected {FORM} (got {form!r})")
        limits[name] = limit
    return ServiceLevelObjectives(**limits)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _within(limit_ms: float | None, seconds: float | None) -> bool:
    """A latency that does not exist, such as tpot of a one-token output, is within its limit."""
    return limit_ms is None or seconds is None or 1000 * seconds <= limit_ms
