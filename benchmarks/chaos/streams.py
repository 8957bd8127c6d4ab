"""Clients that always have a stream open, each judged by itself."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from benchmarks.chaos.comparison import Comparison, Verdict
from benchmarks.chaos.gaps import Pause, Window, longest_pause
from benchmarks.chaos.mix import Ask
from quire.async_client import AsyncClient
from quire.errors import QuireError
from quire.outputs import RequestDelta, RequestOutput

# A server that refuses at once is not asked in a tight loop.
_AFTER_FAILURE_S = 0.5


@dataclass(frozen=True)
class Reference:
    """A request, and what comes of it undisturbed."""

    ask: Ask
    output: RequestOutput
    # How far log-probabilities may be from those of the output.
    logprob_tolerance: float

    @property
    def is_complete(self) -> bool:
        """Each token has its log-probabilities, if they were asked for."""
        expected = self.ask.params.logprobs is not None
        return all(
            len(output.logprobs) == expected * len(output.token_ids)
            for output in self.output.outputs
        )


class Life:
    """One request, from its beginning to its end."""

    def __init__(self, request_id: str, reference: Reference) -> None:
        self.request_id = request_id
        self.ask = reference.ask
        self.comparison = Comparison(reference.output, reference.logprob_tolerance)
        # When it began, and when its messages came and its end did, by the monotonic clock.
        self.times_s = [time.monotonic()]
        self.is_over = False

    def note(self) -> None:
        self.times_s.append(time.monotonic())

    @property
    def has_left(self) -> bool:
        """Its client has seen enough."""
        leaves_after = self.ask.leaves_after
        return leaves_after is not None and self.comparison.num_tokens >= leaves_after

    def longest_pause(self, window: Window) -> Pause | None:
        present = [] if self.is_over else [time.monotonic()]
        return longest_pause([*self.times_s, *present], window)

    def __str__(self) -> str:
        return f"{self.request_id} ({self.ask.kind})"


class Streams:
    """So many clients, each with one request after the other, drawn from the references."""

    def __init__(
        self, targets: Sequence[str], references: Sequence[Reference], count: int, seed: int
    ) -> None:
        # Every wrong one, for the report; of the right ones only those that may still be asked of.
        self.wrong: list[Life] = []
        self.num_over = 0
        self.num_tokens = 0
        self.num_left = 0
        self._targets = targets
        self._references = references
        self._count = count
        self._seed = seed
        self._current: dict[int, Life] = {}
        self._over: list[Life] = []
        self._enough = False
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._ask(index)) for index in range(self._count)]

    async def finish(self, bound_s: float) -> list[Life]:
        """Begins no more requests; gives those that are not over when the time is."""
        self._enough = True
        await asyncio.wait(self._tasks, timeout=bound_s)
        return list(self._current.values())

    async def close(self) -> None:
        """Whatever is open is cancelled."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def check(self) -> None:
        """Raises what a client's task has raised: an error of this program."""
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()

    def unmoved_since(self, moment_s: float) -> list[Life]:
        """Those that nothing has come for."""
        return [life for life in self._current.values() if life.times_s[-1] <= moment_s]

    def pauses(self, window: Window) -> list[tuple[Life, Pause]]:
        """The longest of each request that lived in the window, from the shortest of them on."""
        lives = [*self._over, *self._current.values()]
        found = [(life, pause) for life in lives if (pause := life.longest_pause(window))]
        return sorted(found, key=lambda one: one[1].seconds)

    def forget(self) -> None:
        """What is over is not asked about any more."""
        self._over.clear()

    def count_of(self, verdict: Verdict) -> int:
        """Requests that this is true of."""
        return sum(
            any(finding.verdict is verdict for finding in life.comparison.findings)
            for life in self.wrong
        )

    async def _ask(self, index: int) -> None:
        rng = random.Random(f"{self._seed}/{index}")
        number = 0
        while not self._enough:
            life = Life(f"{self._seed}-{index}-{number}", rng.choice(self._references))
            self._current[index] = life
            await _follow(self._target(index + number), life)
            self._end(index, life)
            number += 1
            if life.comparison.findings:
                await asyncio.sleep(_AFTER_FAILURE_S)
        self._current.pop(index, None)

    def _target(self, first: int) -> str:
        """All of them; the one that a client begins with changes from request to request."""
        first %= len(self._targets)
        return ",".join([*self._targets[first:], *self._targets[:first]])

    def _end(self, index: int, life: Life) -> None:
        life.note()
        life.is_over = True
        self._over.append(life)
        self.num_over += 1
        self.num_left += life.has_left
        self.num_tokens += life.comparison.num_tokens
        if life.comparison.findings:
            self.wrong.append(life)
        if self._enough:
            del self._current[index]


async def _follow(target: str, life: Life) -> None:
    """Takes a request's messages until it ends, or its client has seen enough.

    Each has a client of its own, which does not know what others have heard of the targets.
    """
    async with AsyncClient(target) as client:
        messages = client.stream_generate(
            life.ask.prompt, life.ask.params, request_id=life.request_id
        )
        try:
            async with aclosing(messages):
                await _take(messages, life)
        except QuireError as error:
            life.comparison.fail(f"{error} (reason {error.reason})")


async def _take(messages: AsyncIterator[RequestDelta], life: Life) -> None:
    async for message in messages:
        life.note()
        life.comparison.take(message)
        if life.has_left:
            return
    life.comparison.end()
