"""Latencies and outcomes of requests."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import grpc
from prometheus_client import CollectorRegistry, Counter

from gateway_svc.access.tenant import DEFAULT_CLASS
from gateway_svc.admission.live_limits import REASONS
from gateway_svc.generation.choice import ChoiceUpdate
from gateway_svc.metrics.histogram import LabelledHistogram
from gateway_svc.metrics.objectives import Objective, Objectives
from gateway_svc.scheduler.route import RoutingCounters
from quire.service.errors import RequestError
from quire.service.metrics.histogram import Histogram

_STOP, _LENGTH = "stop", "length"
_TIME_TO_FIRST_TOKEN_S: Final = (
    *(0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
_INTER_TOKEN_LATENCY_S: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2),
    *(0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 40.0, 80.0),
)
_E2E_LATENCY_S: Final = (
    *(0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0),
    *(15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0),
)


_CLASS: Final = "tenant_class"
# With these the service has failed a request. Other codes are the client's doing.
_FAULTS: Final = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.DEADLINE_EXCEEDED,
)
# The scheduler refuses any tenant's requests with this reason; others are limits of one tenant.
_OVERLOAD: Final = "QUEUE_FULL"


@dataclass(frozen=True, slots=True)
class _ClassMetrics:
    """The series of one class of tenants."""

    objective: Objective
    time_to_first_token: Histogram
    inter_token_latency: Histogram
    e2e_latency: Histogram
    # Ended requests that count for the objective, and those of them that kept it.
    counted: Counter
    met: Counter


class GatewayMetrics:
    """The metrics of one gateway, named as vLLM's where it has the same."""

    def __init__(self, objectives: Objectives, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = registry = CollectorRegistry()
        self.clock = clock
        self._objectives = objectives
        self._time_to_first_token = self._histogram(
            "quire:time_to_first_token_seconds",
            "Seconds from a request's arrival to its first token.",
            _TIME_TO_FIRST_TOKEN_S,
        )
        self._inter_token_latency = self._histogram(
            "quire:inter_token_latency_seconds",
            "Seconds between a choice's tokens; tokens received together share the time equally.",
            _INTER_TOKEN_LATENCY_S,
        )
        self._e2e_latency = self._histogram(
            "quire:e2e_request_latency_seconds",
            "Seconds from the arrival of a successful request to its end.",
            _E2E_LATENCY_S,
        )
        self._counted = Counter(
            "quire:slo_requests",
            "Ended requests that count for their class's latency objectives.",
            [_CLASS],
            registry=registry,
        )
        self._met = Counter(
            "quire:slo_requests_met",
            "Requests that succeeded within their class's latency objectives.",
            [_CLASS],
            registry=registry,
        )
        self._ended_choices = Counter(
            "quire:request_success",
            "Choices that ended, by finish reason.",
            ["finished_reason"],
            registry=registry,
        )
        self._failures = Counter(
            "quire:request_failure",
            "Requests that failed or were cancelled, by gRPC status code.",
            ["code"],
            registry=registry,
        )
        self._refused_calls = Counter(
            "quire:calls_refused",
            "Calls that the gateway refused at one of its limits, or while it stopped, by reason.",
            ["reason"],
            registry=registry,
        )
        self.routing = self._routing_counters()
        self._resumed = Counter(
            "quire:requests_resumed",
            "Calls that resume a request.",
            registry=registry,
        )
        self._ended_by_stop = self._ended_choices.labels(_STOP)
        self._ended_by_length = self._ended_choices.labels(_LENGTH)
        self._classes: dict[str, _ClassMetrics] = {}
        self._begin_with_zero()

    def _begin_with_zero(self) -> None:
        """Export series from the start, so that their first increment is visible as a rate."""
        for code in _FAULTS:
            self._failures.labels(code.name.lower())
        for reason in REASONS:
            self._refused_calls.labels(reason.lower())
        self._of_class(DEFAULT_CLASS)

    def _routing_counters(self) -> RoutingCounters:
        return RoutingCounters(
            reattached=self._counter(
                "quire:requests_reattached",
                "Requests attached again, to a new leader or because tokens were missing.",
            ),
            spilled=self._counter(
                "quire:requests_spilled",
                "Requests given to another shard than their prefix's, which had too much load.",
            ),
            refused=self._counter(
                "quire:requests_refused_by_shard",
                "Refusals by a shard without room after which another one was tried.",
            ),
            moved=self._counter(
                "quire:requests_moved",
                "Requests moved to another shard, because their own named it.",
            ),
        )

    def _counter(self, name: str, documentation: str) -> Callable[[], object]:
        """A function that counts."""
        return Counter(name, documentation, registry=self.registry).inc

    def _histogram(
        self, name: str, documentation: str, bounds: Sequence[float]
    ) -> LabelledHistogram:
        return LabelledHistogram(name, documentation, _CLASS, bounds, self.registry)

    def _of_class(self, name: str) -> _ClassMetrics:
        found = self._classes.get(name)
        if found is None:
            found = self._classes[name] = _ClassMetrics(
                self._objectives.of(name),
                self._time_to_first_token.labels(name),
                self._inter_token_latency.labels(name),
                self._e2e_latency.labels(name),
                self._counted.labels(name),
                self._met.labels(name),
            )
        return found

    @contextmanager
    def request(self, tenant_class: str = DEFAULT_CLASS) -> Iterator["RequestTimes"]:
        """Measure a request of a tenant of this class, from its arrival to its end."""
        series = self._of_class(tenant_class)
        times = RequestTimes(self, series, self.clock())
        with self._count_failure(series):
            yield times
        series.e2e_latency.observe(times.since_arrival_s())
        series.counted.inc()
        if times.meet(series.objective):
            series.met.inc()

    @contextmanager
    def resumed_request(self, tenant_class: str) -> Iterator["RequestTimes"]:
        """Measure a resumed request: no time to first token and no end-to-end latency. It does not
        count for an objective: the call that started it does."""
        self._resumed.inc()
        with self._count_failure():
            yield RequestTimes(self, self._of_class(tenant_class), None)

    @contextmanager
    def _count_failure(self, series: _ClassMetrics | None = None) -> Iterator[None]:
        """Count a failure; also as a missed objective of `series`, unless the client caused it."""
        is_fault = False
        try:
            yield
        except RequestError as error:
            self._failures.labels(error.code.name.lower()).inc()
            is_fault = error.code in _FAULTS or error.info.reason == _OVERLOAD
            raise
        except asyncio.CancelledError:
            self._failures.labels("cancelled").inc()
            raise
        except Exception:
            self._failures.labels("internal").inc()
            is_fault = True
            raise
        finally:
            if is_fault and series is not None:
                series.counted.inc()

    def call_refused(self, reason: str) -> None:
        self._refused_calls.labels(reason.lower()).inc()

    def choice_ended(self, by_stop: bool) -> None:
        (self._ended_by_stop if by_stop else self._ended_by_length).inc()


@dataclass(slots=True)
class _ChoiceTimes:
    """When a choice's first and latest tokens were received, and how many came after the first
    ones."""

    first_at: float
    latest_at: float
    num_later_tokens: int = 0

    @property
    def mean_inter_token_latency_s(self) -> float:
        return (self.latest_at - self.first_at) / max(1, self.num_later_tokens)


class RequestTimes:
    """Token latencies of one request."""

    def __init__(
        self, metrics: GatewayMetrics, series: _ClassMetrics, arrived_at: float | None
    ) -> None:
        """`arrived_at` is None for a resumed request."""
        self._metrics = metrics
        self._series = series
        self._arrived_at = arrived_at
        self._time_to_first_token_s: float | None = None
        self._choices: dict[int, _ChoiceTimes] = {}

    def of_another_prompt(self) -> "RequestTimes":
        """Those of another prompt of the same call, whose choices have the same indices."""
        return RequestTimes(self._metrics, self._series, self._arrived_at)

    def since_arrival_s(self) -> float:
        """Seconds since its arrival; 0 for a resumed request."""
        return 0.0 if self._arrived_at is None else self._metrics.clock() - self._arrived_at

    def meet(self, objective: Objective) -> bool:
        """Whether the request, which has ended, has kept an objective. Without tokens, its end
        stands for the first one."""
        first_s = self._time_to_first_token_s
        if first_s is None:
            first_s = self.since_arrival_s()
        return first_s <= objective.time_to_first_token_s and all(
            choice.mean_inter_token_latency_s <= objective.inter_token_latency_s
            for choice in self._choices.values()
        )

    def observe(self, update: Iterable[ChoiceUpdate]) -> None:
        """Record the time of an update that has arrived now."""
        now = self._metrics.clock()
        for part in update:
            self._observe(part, now)

    def _observe(self, update: ChoiceUpdate, now: float) -> None:
        if num_tokens := len(update.token_ids):
            if not self._choices and self._arrived_at is not None:
                self._time_to_first_token_s = now - self._arrived_at
                self._series.time_to_first_token.observe(self._time_to_first_token_s)
            choice = self._choices.get(update.index)
            if choice is None:
                self._choices[update.index] = _ChoiceTimes(now, now)
            else:
                latency_s = (now - choice.latest_at) / num_tokens
                self._series.inter_token_latency.observe(latency_s, num_tokens)
                choice.latest_at = now
                choice.num_later_tokens += num_tokens
        if update.end is not None:
            self._metrics.choice_ended(update.end.is_stop)
