"""Clients that always have a stream open; each stream is compared with its reference."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from benchmarks.chaos.comparison import Comparison, Verdict
from benchmarks.chaos.event_source import EventStream, EventStreamError
from benchmarks.chaos.gaps import Pause, Window, longest_pause
from benchmarks.chaos.mix import Request
from quire.client.async_client import AsyncClient
from quire.client.errors import QuireError
from quire.client.outputs import RequestDelta, RequestOutput

# Keeps a client from retrying in a tight loop.
_BACKOFF_S = 0.5


@dataclass(frozen=True)
class Reference:
    """A request, and its output without faults."""

    request: Request
    output: RequestOutput
    # Largest permitted difference of log-probabilities.
    logprob_tolerance: float

    @property
    def is_complete(self) -> bool:
        """Whether each token has its log-probabilities, if requested."""
        expected = self.request.params.logprobs is not None
        return all(
            len(output.logprobs) == expected * len(output.token_ids)
            for output in self.output.outputs
        )


class Stream:
    """One request, from its start to its end."""

    def __init__(self, request_id: str, reference: Reference) -> None:
        self.request_id = request_id
        self.request = reference.request
        self.comparison = Comparison(reference.output, reference.logprob_tolerance)
        # Start, each message, and end, by the monotonic clock.
        self.times_s = [time.monotonic()]
        self.is_finished = False

    def note(self) -> None:
        self.times_s.append(time.monotonic())

    @property
    def is_cancelled(self) -> bool:
        """Whether the client has received the tokens after which it cancels."""
        cancel_after = self.request.cancel_after
        return cancel_after is not None and self.comparison.num_tokens >= cancel_after

    @property
    def _times_until_now_s(self) -> list[float]:
        return self.times_s if self.is_finished else [*self.times_s, time.monotonic()]

    def first_wait(self) -> Pause:
        """The time until the first message, or so far."""
        return Pause(self._times_until_now_s[0], self._times_until_now_s[1])

    def longest_pause(self, window: Window) -> Pause | None:
        """The longest between two messages."""
        return longest_pause(self._times_until_now_s[1:], window)

    def __str__(self) -> str:
        return f"{self.request_id} ({self.request.kind})"


class Streams:
    """`count` clients, each with one request after the other, drawn from the references."""

    def __init__(
        self,
        targets: Sequence[str],
        references: Sequence[Reference],
        count: int,
        seed: int,
        http_addresses: Sequence[str] = (),
    ) -> None:
        """If there are addresses for HTTP, every second client reads server-sent events."""
        # All streams with findings, for the report.
        self.wrong: list[Stream] = []
        self.num_finished = 0
        self.num_tokens = 0
        self.num_cancelled = 0
        self._targets = targets
        self._http_addresses = http_addresses
        self._references = references
        # Log-probabilities have another form in HTTP.
        self._for_events = [r for r in references if r.request.params.logprobs is None]
        self._count = count
        self._seed = seed
        self._current: dict[int, Stream] = {}
        self._finished: list[Stream] = []
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._run_client(index)) for index in range(self._count)]

    async def finish(self, bound_s: float) -> list[Stream]:
        """Start no more requests; return those that have not ended after `bound_s`."""
        self._stopping = True
        await asyncio.wait(self._tasks, timeout=bound_s)
        return list(self._current.values())

    async def close(self) -> None:
        """Cancel all open streams."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def check(self) -> None:
        """Raise the exception of a client's task: an error of this program."""
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()

    @property
    def current_ids(self) -> list[str]:
        """Of the requests that are open."""
        return [stream.request_id for stream in self._current.values()]

    def stalled_since(self, moment_s: float) -> list[Stream]:
        """Return the streams that have received no message since then."""
        return [stream for stream in self._current.values() if stream.times_s[-1] <= moment_s]

    def pauses(self, window: Window) -> list[tuple[Stream, Pause]]:
        """The longest of each request that lived in the window, from the shortest of them on."""
        found = [(stream, pause) for stream in self._all if (pause := stream.longest_pause(window))]
        return sorted(found, key=lambda one: one[1].seconds)

    def first_waits(self, window: Window) -> list[float]:
        """The seconds to the first message of each request that waited for it in the window."""
        waits = [stream.first_wait() for stream in self._all]
        return [wait.seconds for wait in waits if window.overlaps(wait)]

    @property
    def _all(self) -> list[Stream]:
        return [*self._finished, *self._current.values()]

    def clear_finished(self) -> None:
        """Exclude the streams that have ended from `pauses` and `first_waits`."""
        self._finished.clear()

    def count_of(self, verdict: Verdict) -> int:
        """Return the number of requests with such a finding."""
        return sum(
            any(finding.verdict is verdict for finding in stream.comparison.findings)
            for stream in self.wrong
        )

    async def _run_client(self, index: int) -> None:
        rng = random.Random(f"{self._seed}/{index}")
        number = 0
        while not self._stopping:
            has_events = bool(self._http_addresses) and index % 2 == 1
            references = self._for_events if has_events else self._references
            stream = Stream(f"{self._seed}-{index}-{number}", rng.choice(references))
            self._current[index] = stream
            if has_events:
                await _follow_events(rotated(self._http_addresses, index + number), stream)
            else:
                await _follow(",".join(rotated(self._targets, index + number)), stream)
            self._end(index, stream)
            number += 1
            if stream.comparison.findings:
                await asyncio.sleep(_BACKOFF_S)
        self._current.pop(index, None)

    def _end(self, index: int, stream: Stream) -> None:
        stream.note()
        stream.is_finished = True
        self._finished.append(stream)
        self.num_finished += 1
        self.num_cancelled += stream.is_cancelled
        self.num_tokens += stream.comparison.num_tokens
        if stream.comparison.findings:
            self.wrong.append(stream)
        if self._stopping:
            del self._current[index]


def rotated(addresses: Sequence[str], first: int) -> list[str]:
    """All addresses in an order that rotates from request to request."""
    first %= len(addresses)
    return [*addresses[first:], *addresses[:first]]


async def _follow_events(addresses: Sequence[str], stream: Stream) -> None:
    """Read a stream of server-sent events until it ends or is cancelled."""
    source = EventStream(addresses, stream.request_id, stream.request)
    try:
        async with aclosing(source.messages()) as messages:
            await _take(messages, stream)
    except EventStreamError as error:
        stream.comparison.fail(str(error))


async def _follow(target: str, stream: Stream) -> None:
    """Read a stream until it ends or is cancelled.

    Uses its own client, which shares no state about the targets with others.
    """
    async with AsyncClient(target) as client:
        messages = client.stream_generate(
            stream.request.prompt, stream.request.params, request_id=stream.request_id
        )
        try:
            async with aclosing(messages):
                await _take(messages, stream)
        except QuireError as error:
            stream.comparison.fail(f"{error} (reason {error.reason})")


async def _take(messages: AsyncIterator[RequestDelta], stream: Stream) -> None:
    async for message in messages:
        stream.note()
        stream.comparison.take(message)
        if stream.is_cancelled:
            return
    stream.comparison.end()
