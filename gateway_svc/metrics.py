"""What users feel: the times of requests, and how they end."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from prometheus_client import CollectorRegistry, Counter

from gateway_svc.choice import Written
from gateway_svc.histogram import Histogram
from quire.service.errors import RequestError

_STOP, _LENGTH = "stop", "length"
_FIRST_TOKEN_S: Final = (
    *(0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
_BETWEEN_TOKENS_S: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2),
    *(0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 40.0, 80.0),
)
_WHOLE_S: Final = (
    *(0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0),
    *(15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0),
)


class GatewayMetrics:
    """One gateway's. Names follow vLLM's where it has the same thing."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = registry = CollectorRegistry()
        self.clock = clock
        self.first_token = Histogram(
            "quire:time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            bounds=_FIRST_TOKEN_S,
            registry=registry,
        )
        self.between_tokens = Histogram(
            "quire:inter_token_latency_seconds",
            "Between a choice's tokens; those that come together share the time in equal parts.",
            bounds=_BETWEEN_TOKENS_S,
            registry=registry,
        )
        self._whole = Histogram(
            "quire:e2e_request_latency_seconds",
            "From the arrival of a request that succeeds to its end.",
            bounds=_WHOLE_S,
            registry=registry,
        )
        self._ended_choices = Counter(
            "quire:request_success",
            "Choices that ended, by what ended them.",
            ["finished_reason"],
            registry=registry,
        )
        self._failures = Counter(
            "quire:request_failure",
            "Requests that failed or were cancelled, by the gRPC code.",
            ["code"],
            registry=registry,
        )
        self.reattached = Counter(
            "quire:requests_reattached",
            "Requests asked for again, of a new leader or where tokens were missing.",
            registry=registry,
        )
        self._resumed = Counter(
            "quire:requests_resumed",
            "Calls that go on with a request.",
            registry=registry,
        )
        # There from the start, so that a first one is an increase.
        self._ended_by_stop = self._ended_choices.labels(_STOP)
        self._ended_by_length = self._ended_choices.labels(_LENGTH)

    @contextmanager
    def request(self) -> Iterator["RequestTimes"]:
        """The time of a request, from its arrival to its end."""
        arrived_at = self.clock()
        with self._failures_counted():
            yield RequestTimes(self, arrived_at)
        self._whole.observe(self.clock() - arrived_at)

    @contextmanager
    def resumed_request(self) -> Iterator["RequestTimes"]:
        """One whose first token and beginning were seen elsewhere."""
        self._resumed.inc()
        with self._failures_counted():
            yield RequestTimes(self, None)

    @contextmanager
    def _failures_counted(self) -> Iterator[None]:
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
    """The times of one request's tokens."""

    def __init__(self, metrics: GatewayMetrics, arrived_at: float | None) -> None:
        """Without `arrived_at` the first token was another's."""
        self._metrics = metrics
        self._arrived_at = arrived_at
        # When the latest tokens came, by choice.
        self._latest_at: dict[int, float] = {}

    async def of(
        self, updates: AsyncIterator[Sequence[Written]]
    ) -> AsyncIterator[Sequence[Written]]:
        """The same updates, whose times are taken on their way."""
        async for update in updates:
            now = self._metrics.clock()
            for written in update:
                self._take(written, now)
            yield update

    def _take(self, written: Written, now: float) -> None:
        metrics = self._metrics
        if num_tokens := len(written.token_ids):
            if not self._latest_at and self._arrived_at is not None:
                metrics.first_token.observe(now - self._arrived_at)
            latest_at = self._latest_at.get(written.index)
            if latest_at is not None:
                metrics.between_tokens.observe((now - latest_at) / num_tokens, num_tokens)
            self._latest_at[written.index] = now
        if written.outcome is not None:
            metrics.choice_ended(written.outcome.is_stop)
