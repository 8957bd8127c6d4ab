"""One run: a stack, streams that are always open, faults at random moments, and what came of it."""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.chaos.comparison import Verdict
from benchmarks.chaos.ending import left_behind
from benchmarks.chaos.events import Events
from benchmarks.chaos.faults import Fault
from benchmarks.chaos.gaps import Window
from benchmarks.chaos.mix import Ask, catalogue
from benchmarks.chaos.stack import LOGPROB_TOLERANCES, SETTINGS, ChaosStack, Unsteady
from benchmarks.chaos.steady import wait_until_steady
from benchmarks.chaos.streams import Reference, Streams
from quire.async_client import AsyncClient

# Before the first fault: what streams do that nothing disturbs.
_CALM_S = 8.0
# Between a recovery and the next fault.
_BETWEEN_S = (0.2, 2.5)
_REFERENCE_TIMEOUT_S = 300.0
# Of the longest pauses after each fault.
_NUM_TOLD = 3


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be done."""

    model: str
    engine: str
    seed: int
    # Each of them so many times, in random order.
    faults: Sequence[Fault]
    times: int
    num_streams: int
    num_requests: int
    # Seconds within which a stack has to be steady again.
    bound_s: float
    # Receives what happened, and the processes' logs.
    logs: Path


@dataclass(frozen=True)
class Recovered:
    """Tokens of sequences that were admitted again, and how many of them the caches had."""

    num_tokens: int = 0
    num_cached: int = 0

    def __add__(self, other: "Recovered") -> "Recovered":
        return Recovered(self.num_tokens + other.num_tokens, self.num_cached + other.num_cached)

    def __sub__(self, other: "Recovered") -> "Recovered":
        return Recovered(self.num_tokens - other.num_tokens, self.num_cached - other.num_cached)


@dataclass
class Outcome:
    """What came of it."""

    # Longest pauses in seconds of the requests alive while nothing was done.
    calm: list[float] = field(default_factory=list)
    # The same by fault, and the seconds from each fault to the steady state.
    pauses: dict[str, list[float]] = field(default_factory=dict)
    recoveries: dict[str, list[float]] = field(default_factory=dict)
    # By fault: sequences' tokens that were taken up again under the leader then, and how many of
    # them the caches had.
    recovered: dict[str, Recovered] = field(default_factory=dict)
    num_requests: int = 0
    num_left: int = 0
    num_tokens: int = 0
    # Requests that were lost, repeated, changed or failed.
    num_wrong: dict[Verdict, int] = field(default_factory=dict)
    # Whatever else must not be, in words.
    violations: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        return not self.violations and not any(self.num_wrong.values())


async def run(plan: Plan, events: Events) -> Outcome:
    stack = ChaosStack(plan.model, SETTINGS[plan.engine])
    events.say(f"seed {plan.seed}; starting the stack")
    await asyncio.to_thread(stack.local.start)
    outcome = Outcome()
    try:
        await _Experiment(plan, stack, events, outcome).run()
        outcome.violations += stack.unexpected_ends + stack.complaints()
    finally:
        stack.save_logs(plan.logs)
        # What is stuck would take its time to drain.
        stack.local.kill()
        await asyncio.to_thread(stack.local.stop)
    return outcome


class _Experiment:
    """The run on a stack that is up."""

    def __init__(self, plan: Plan, stack: ChaosStack, events: Events, outcome: Outcome) -> None:
        self._plan = plan
        self._stack = stack
        self._events = events
        self._outcome = outcome
        self._rng = random.Random(plan.seed)
        # What was recovered by then, by epoch and worker.
        self._seen: dict[tuple[int, int], Recovered] = {}

    async def run(self) -> None:
        references = await self._references()
        for kind in sorted({one.ask.kind for one in references if not one.is_complete}):
            self._violation(f"undisturbed: {kind}: tokens without log-probabilities")
        streams = Streams(
            self._stack.local.addresses, references, self._plan.num_streams, self._plan.seed
        )
        streams.start()
        try:
            await self._disturb(streams)
        except Unsteady as error:
            self._violation(str(error))
        finally:
            await streams.close()
            self._count(streams)

    async def _disturb(self, streams: Streams) -> None:
        await self._calm(streams)
        for number, fault in enumerate(faults := self._order(), start=1):
            await asyncio.sleep(self._rng.uniform(*_BETWEEN_S))
            await self._strike(fault, f"{number}/{len(faults)}", streams)
        self._events.say("no more faults; the streams come to their ends")
        for life in await streams.finish(self._plan.bound_s):
            self._violation(f"{life} does not end")
        for left in await left_behind(self._stack):
            self._violation(f"left behind: {left}")

    async def _references(self) -> list[Reference]:
        asks = catalogue(self._plan.seed, self._plan.num_requests)
        self._events.say(f"{len(asks)} requests run undisturbed")
        free = asyncio.Semaphore(self._plan.num_streams)
        tolerance = LOGPROB_TOLERANCES[self._plan.engine]
        async with AsyncClient(self._stack.local.address) as client:
            return await asyncio.gather(
                *(
                    _reference(client, ask, f"{self._plan.seed}-reference-{i}", tolerance, free)
                    for i, ask in enumerate(asks)
                )
            )

    async def _calm(self, streams: Streams) -> None:
        await wait_until_steady(self._stack, streams, self._plan.bound_s)
        streams.forget()
        begin_s = time.monotonic()
        await asyncio.sleep(_CALM_S)
        pauses = streams.pauses(Window(begin_s, time.monotonic()))
        self._outcome.calm = [pause.seconds for _, pause in pauses]

    def _order(self) -> list[Fault]:
        faults = [fault for fault in self._plan.faults for _ in range(self._plan.times)]
        self._rng.shuffle(faults)
        return faults

    async def _strike(self, fault: Fault, number: str, streams: Streams) -> None:
        streams.forget()
        begin_s = time.monotonic()
        num_wrong = len(streams.wrong)
        self._events.say(f"{number} {fault.name}")
        struck = await fault.strike(self._stack, self._rng)
        try:
            await wait_until_steady(self._stack, streams, self._plan.bound_s)
        finally:
            window = Window(begin_s, time.monotonic())
            self._events.say(f"   {struck}: {window.end_s - begin_s:.1f} s")
            self._note_pauses(fault, window, streams)
            self._tell_of_wrong(streams, num_wrong)
        self._outcome.recoveries.setdefault(fault.name, []).append(window.end_s - begin_s)
        await self._note_recovered(fault)

    async def _note_recovered(self, fault: Fault) -> None:
        """A leader counts from its beginning, and each worker's lane from its opening."""
        status = await asyncio.to_thread(self._stack.status)
        if status is None:
            return
        found = {}
        for worker in status.workers:
            now = Recovered(worker.num_recovered_tokens, worker.num_recovered_hit_tokens)
            key = (status.epoch, worker.incarnation)
            before = self._seen.get(key, Recovered())
            found[key] = now
            if now.num_tokens >= before.num_tokens:
                now -= before
            so_far = self._outcome.recovered.get(fault.name, Recovered())
            self._outcome.recovered[fault.name] = so_far + now
        self._seen = found

    def _note_pauses(self, fault: Fault, window: Window, streams: Streams) -> None:
        pauses = streams.pauses(window)
        seconds = [pause.seconds for _, pause in pauses]
        self._outcome.pauses.setdefault(fault.name, []).extend(seconds)
        for life, pause in reversed(pauses[-_NUM_TOLD:]):
            self._events.say(
                f"   {life}: nothing for {pause.seconds:.2f} s from "
                f"{pause.begin_s - window.begin_s:+.2f} s"
            )

    def _tell_of_wrong(self, streams: Streams, known: int) -> None:
        for life in streams.wrong[known:]:
            for finding in life.comparison.findings:
                self._events.say(f"   {life}: {finding.verdict}: {finding.said}")

    def _count(self, streams: Streams) -> None:
        outcome = self._outcome
        outcome.num_requests = streams.num_over
        outcome.num_left = streams.num_left
        outcome.num_tokens = streams.num_tokens
        outcome.num_wrong = {verdict: streams.count_of(verdict) for verdict in Verdict}

    def _violation(self, said: str) -> None:
        self._events.say(f"VIOLATION: {said}")
        self._outcome.violations.append(said)


async def _reference(
    client: AsyncClient, ask: Ask, request_id: str, tolerance: float, free: asyncio.Semaphore
) -> Reference:
    async with free:
        output = await client.generate(
            ask.prompt, ask.params, request_id=request_id, timeout_s=_REFERENCE_TIMEOUT_S
        )
    return Reference(ask, output, tolerance)
