"""Service level objectives: which requests were served well."""

from collections.abc import Iterable
from dataclasses import dataclass

from quire.bench.trace import Trace

_NAMES = ("ttft", "tpot", "e2el")
FORM = f"NAME:MILLISECONDS with a NAME of {', '.join(_NAMES)}"


@dataclass(frozen=True)
class Objectives:
    """Most milliseconds, under the names that vLLM's benchmark has for them; None sets none."""

    # To the first token.
    ttft: float | None = None
    # The mean time of each further token.
    tpot: float | None = None
    # To the end.
    e2el: float | None = None

    @property
    def are_set(self) -> bool:
        return self != Objectives()

    def met_by(self, trace: Trace) -> bool:
        """Whether a request completed within all of them."""
        return trace.is_complete and all(
            _within(limit_ms, seconds)
            for limit_ms, seconds in (
                (self.ttft, trace.first_token_s),
                (self.tpot, trace.per_output_token_s),
                (self.e2el, trace.latency_s),
            )
        )


def objectives(forms: Iterable[str]) -> Objectives:
    """From `ttft:200` and the like. ValueError, with what was written, for anything else."""
    limits: dict[str, float] = {}
    for form in forms:
        name, _, limit = form.partition(":")
        if name not in _NAMES:
            raise ValueError(f"goodput: expected {FORM} (got {form!r})")
        limits[name] = _milliseconds(form, limit)
    return Objectives(**limits)


def _milliseconds(form: str, text: str) -> float:
    try:
        limit = float(text)
    except ValueError:
        limit = -1.0
    if not limit > 0:
        raise ValueError(f"goodput: expected {FORM} (got {form!r})")
    return limit


def _within(limit_ms: float | None, seconds: float | None) -> bool:
    """What did not happen, as the second token of an output of one, was not late."""
    return limit_ms is None or seconds is None or 1000 * seconds <= limit_ms
