"""Latencies and outcomes of requests."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from prometheus_client import CollectorRegistry, Counter

from gateway_svc.generation.choice import ChoiceUpdate
from gateway_svc.metrics.histogram import Histogram
from quire.service.errors import RequestError

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


class GatewayMetrics:
    """The metrics of one gateway, named as vLLM's where it has the same."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = registry = CollectorRegistry()
        self.clock = clock
        self.time_to_first_token = Histogram(
            "quire:time_to_first_token_seconds",
            "Seconds from a request's arrival to its first token.",
            bounds=_TIME_TO_FIRST_TOKEN_S,
            registry=registry,
        )
        self.inter_token_latency = Histogram(
            "quire:inter_token_latency_seconds",
            "Seconds between a choice's tokens; tokens received together share the time equally.",
            bounds=_INTER_TOKEN_LATENCY_S,
            registry=registry,
        )
        self._e2e_latency = Histogram(
            "quire:e2e_request_latency_seconds",
            "Seconds from the arrival of a successful request to its end.",
            bounds=_E2E_LATENCY_S,
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
        self.reattached = Counter(
            "quire:requests_reattached",
            "Requests attached again, to a new leader or because tokens were missing.",
            registry=registry,
        )
        self._resumed = Counter(
            "quire:requests_resumed",
            "Calls that resume a request.",
            registry=registry,
        )
        # Exported as 0 from the start, so that the first increment is visible as a rate.
        self._ended_by_stop = self._ended_choices.labels(_STOP)
        self._ended_by_length = self._ended_choices.labels(_LENGTH)

    @contextmanager
    def request(self) -> Iterator["RequestTimes"]:
        """Measure a request, from its arrival to its end."""
        arrived_at = self.clock()
        with self._count_failure():
            yield RequestTimes(self, arrived_at)
        self._e2e_latency.observe(self.clock() - arrived_at)

    @contextmanager
    def resumed_request(self) -> Iterator["RequestTimes"]:
        """Measure a resumed request: no time to first token and no end-to-end latency."""
        self._resumed.inc()
        with self._count_failure():
            yield RequestTimes(self, None)

    @contextmanager
    def _count_failure(self) -> Iterator[None]:
        try:
            yield
        except RequestError as error:
            self._failures.labels(error.code.name.lower()).inc()
            raise
        except asyncio.CancelledError:
            self._failures.labels("cancelled").inc()
            raise
        except Exception:
            self._failures.labels("internal").inc()
            raise

    def choice_ended(self, by_stop: bool) -> None:
        (self._ended_by_stop if by_stop else self._ended_by_length).inc()


class RequestTimes:
    """Token latencies of one request."""

    def __init__(self, metrics: GatewayMetrics, arrived_at: float | None) -> None:
        """`arrived_at` is None for a resumed request."""
        self._metrics = metrics
        self._arrived_at = arrived_at
        # When the latest tokens were received, by choice.
        self._latest_at: dict[int, float] = {}

    async def measure(
        self, updates: AsyncIterator[Sequence[ChoiceUpdate]]
    ) -> AsyncIterator[Sequence[ChoiceUpdate]]:
        """Pass updates through and record their times."""
        async for update in updates:
            now = self._metrics.clock()
            for part in update:
                self._observe(part, now)
            yield update

    def _observe(self, update: ChoiceUpdate, now: float) -> None:
        metrics = self._metrics
        if num_tokens := len(update.token_ids):
            if not self._latest_at and self._arrived_at is not None:
                metrics.time_to_first_token.observe(now - self._arrived_at)
            latest_at = self._latest_at.get(update.index)
            if latest_at is not None:
                metrics.inter_token_latency.observe((now - latest_at) / num_tokens, num_tokens)
            self._latest_at[update.index] = now
        if update.end is not None:
            metrics.choice_ended(update.end.is_stop)
