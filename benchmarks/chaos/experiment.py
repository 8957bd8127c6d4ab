"""One run: starts a stack, keeps streams open, injects faults, and collects the findings."""

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import redis

from benchmarks.chaos.comparison import Verdict
from benchmarks.chaos.events import Events
from benchmarks.chaos.faults import Fault
from benchmarks.chaos.gaps import ByShard, Window
from benchmarks.chaos.leftovers import find_leftovers
from benchmarks.chaos.mix import Request, catalogue
from benchmarks.chaos.redis_servers import shards_of_requests
from benchmarks.chaos.stack import (
    LOGPROB_TOLERANCES,
    SETTINGS,
    ChaosStack,
    NotSteadyError,
    Sizes,
)
from benchmarks.chaos.steady import wait_until_steady
from benchmarks.chaos.streams import Reference, Streams
from quire.client.async_client import AsyncClient
from quire.client.decode_counts import DecodeCounts

# Before the first fault: measures the ordinary pauses of streams.
_BASELINE_S = 8.0
# Between a recovery and the next fault.
_INTERVAL_S = (0.2, 2.5)
_REFERENCE_TIMEOUT_S = 300.0
# The name under which the pauses are noted.
SHARDS_RAISED = "shards-raised"
# Longest pauses that are logged after each fault.
_NUM_LOGGED = 3


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Parameters of a run."""

    model: str
    engine: str
    seed: int
    # Each is injected `times` times, in random order.
    faults: Sequence[Fault]
    times: int
    num_streams: int
    num_requests: int
    # Time limit of a recovery.
    bound_s: float
    # Folder for the event log and the logs of the processes.
    logs: Path
    # Drafts of a row in a step. The references have none.
    num_speculative_tokens: int = 0
    # Folder of the draft model; None for drafts by prompt lookup.
    speculative_model: str | None = None
    # Ranks of a worker, or of each of its stages.
    tensor_parallel_size: int = 1
    # Stages of a worker.
    pipeline_parallel_size: int = 1
    sizes: Sizes = field(default_factory=Sizes)
    # The number of shards is raised to this under load, before the first fault.
    raise_shards_to: int | None = None
    has_redis_cluster: bool = False

    @property
    def num_shards(self) -> int:
        """During the faults."""
        return self.raise_shards_to or self.sizes.num_shards

    @property
    def settings(self) -> dict[str, str]:
        """Of the services."""
        drafts = {"QUIRE_WORKER_NUM_SPECULATIVE_TOKENS": str(self.num_speculative_tokens)}
        if self.speculative_model:
            drafts["QUIRE_WORKER_SPECULATIVE_MODEL"] = self.speculative_model
        ranks = {
            "QUIRE_WORKER_TENSOR_PARALLEL_SIZE": str(self.tensor_parallel_size),
            "QUIRE_WORKER_PIPELINE_PARALLEL_SIZE": str(self.pipeline_parallel_size),
        }
        return {**SETTINGS[self.engine], **drafts, **ranks}


@dataclass(frozen=True)
class Recovered:
    """Tokens of sequences that were admitted again, and how many of them were cached."""

    num_tokens: int = 0
    num_cached: int = 0

    def __add__(self, other: "Recovered") -> "Recovered":
        return Recovered(self.num_tokens + other.num_tokens, self.num_cached + other.num_cached)

    def __sub__(self, other: "Recovered") -> "Recovered":
        return Recovered(self.num_tokens - other.num_tokens, self.num_cached - other.num_cached)


@dataclass
class Outcome:
    """Results of a run."""

    # The longest pause in seconds of each request alive before the first fault, and the seconds to
    # the first message of each.
    baseline: list[float] = field(default_factory=list)
    baseline_first: list[float] = field(default_factory=list)
    # The same by fault, and the seconds from each fault to the steady state.
    pauses: dict[str, list[float]] = field(default_factory=dict)
    first_waits: dict[str, list[float]] = field(default_factory=dict)
    recoveries: dict[str, list[float]] = field(default_factory=dict)
    # The pauses by whether the fault has hit their shard; of faults that hit some shards only.
    by_shard: dict[str, ByShard] = field(default_factory=dict)
    # Recovered tokens by fault, as counted by the leaders after the fault.
    recovered: dict[str, Recovered] = field(default_factory=dict)
    # Of the last leader that has seen accepted drafts; None without one.
    decoded: DecodeCounts | None = None
    num_requests: int = 0
    num_cancelled: int = 0
    num_tokens: int = 0
    # Requests that were lost, repeated, changed or failed.
    num_wrong: dict[Verdict, int] = field(default_factory=dict)
    # Other violations, as messages.
    violations: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        return not self.violations and not any(self.num_wrong.values())


async def run(plan: Plan, events: Events) -> Outcome:
    stack = ChaosStack(
        plan.model, plan.settings, plan.sizes, has_redis_cluster=plan.has_redis_cluster
    )
    events.log(f"seed {plan.seed}; starting the stack")
    await asyncio.to_thread(stack.start)
    outcome = Outcome()
    try:
        await _Experiment(plan, stack, events, outcome).run()
        outcome.violations += stack.unexpected_ends + stack.complaints()
    finally:
        stack.save_logs(plan.logs)
        await asyncio.to_thread(stack.stop)
    return outcome


class _Experiment:
    """The run on a started stack."""

    def __init__(self, plan: Plan, stack: ChaosStack, events: Events, outcome: Outcome) -> None:
        self._plan = plan
        self._stack = stack
        self._events = events
        self._outcome = outcome
        self._rng = random.Random(plan.seed)
        # Counters at the last reading, by shard, epoch and incarnation of the worker.
        self._seen: dict[tuple[int, int, int], Recovered] = {}

    async def run(self) -> None:
        references = await self._references()
        for kind in sorted({one.request.kind for one in references if not one.is_complete}):
            self._violation(f"reference: {kind}: tokens without log-probabilities")
        local = self._stack.local
        streams = Streams(
            local.addresses,
            references,
            self._plan.num_streams,
            self._plan.seed,
            local.http_addresses,
        )
        streams.start()
        try:
            await self._disturb(streams)
        except NotSteadyError as error:
            self._violation(str(error))
        else:
            if self._plan.num_speculative_tokens and self._outcome.decoded is None:
                self._violation("no draft was accepted")
        finally:
            await streams.close()
            self._count(streams)

    async def _disturb(self, streams: Streams) -> None:
        await self._measure_baseline(streams)
        if self._plan.raise_shards_to is not None:
            await self._raise_shards(self._plan.raise_shards_to, streams)
        for number, fault in enumerate(faults := self._order(), start=1):
            await asyncio.sleep(self._rng.uniform(*_INTERVAL_S))
            await self._inject(fault, f"{number}/{len(faults)}", streams)
        self._events.log("no more faults; waiting for the streams to end")
        for stream in await streams.finish(self._plan.bound_s):
            self._violation(f"{stream} does not end")
        for left in await find_leftovers(self._stack):
            self._violation(f"left behind: {left}")

    async def _references(self) -> list[Reference]:
        requests = catalogue(self._plan.seed, self._plan.num_requests)
        drafted = self._plan.num_speculative_tokens > 0
        self._events.log(f"{len(requests)} reference requests")
        free = asyncio.Semaphore(self._plan.num_streams)
        tolerance = LOGPROB_TOLERANCES[self._plan.engine]
        async with AsyncClient(self._stack.local.address) as client:
            return await asyncio.gather(
                *(
                    _reference(
                        client,
                        request,
                        f"{self._plan.seed}-reference-{i}",
                        tolerance,
                        free,
                        speculation=False if drafted else None,
                    )
                    for i, request in enumerate(requests)
                )
            )

    async def _measure_baseline(self, streams: Streams) -> None:
        await wait_until_steady(self._stack, streams, self._plan.bound_s)
        streams.clear_finished()
        begin_s = time.monotonic()
        await asyncio.sleep(_BASELINE_S)
        window = Window(begin_s, time.monotonic())
        self._outcome.baseline = [pause.seconds for _, pause in streams.pauses(window)]
        self._outcome.baseline_first = streams.first_waits(window)

    def _order(self) -> list[Fault]:
        faults = [fault for fault in self._plan.faults for _ in range(self._plan.times)]
        self._rng.shuffle(faults)
        return faults

    async def _inject(self, fault: Fault, number: str, streams: Streams) -> None:
        streams.clear_finished()
        begin_s = time.monotonic()
        num_wrong = len(streams.wrong)
        self._events.log(f"{number} {fault.name}")
        # A request that waits may move, which removes the record of its first shard.
        shards = await self._shards_of(streams.current_ids)
        injected = await fault.inject(self._stack, self._rng)
        try:
            await wait_until_steady(self._stack, streams, self._plan.bound_s)
        finally:
            window = Window(begin_s, time.monotonic())
            self._events.log(f"   {injected.target}: {window.end_s - begin_s:.1f} s")
            await self._note_pauses(fault.name, injected.shards, window, streams, shards)
            self._log_findings(streams, num_wrong)
        self._outcome.recoveries.setdefault(fault.name, []).append(window.end_s - begin_s)
        await self._note_recovered(fault)

    async def _raise_shards(self, num_shards: int, streams: Streams) -> None:
        """Raise their number while requests run. Nothing is hit: no stream may pause."""
        streams.clear_finished()
        begin_s = time.monotonic()
        num_wrong = len(streams.wrong)
        self._events.log(f"raising the number of shards to {num_shards}")
        await asyncio.to_thread(self._stack.raise_shards, num_shards)
        try:
            await wait_until_steady(self._stack, streams, self._plan.bound_s)
        finally:
            window = Window(begin_s, time.monotonic())
            self._events.log(f"   {num_shards} shards: {window.end_s - begin_s:.1f} s")
            await self._note_pauses(SHARDS_RAISED, None, window, streams, {})
            self._log_findings(streams, num_wrong)
        self._outcome.recoveries[SHARDS_RAISED] = [window.end_s - begin_s]

    async def _note_recovered(self, fault: Fault) -> None:
        """Add the counters' growth. They start at zero in each epoch and with each lane."""
        found = {}
        for shard, status in enumerate(await asyncio.to_thread(self._stack.statuses)):
            counts = DecodeCounts.of(status.workers)
            if sum(counts.num_accepted_tokens):
                self._outcome.decoded = counts
            for worker in status.workers:
                now = Recovered(worker.num_recovered_tokens, worker.num_recovered_hit_tokens)
                key = (shard, status.epoch, worker.incarnation)
                before = self._seen.get(key, Recovered())
                found[key] = now
                if now.num_tokens >= before.num_tokens:
                    now -= before
                so_far = self._outcome.recovered.get(fault.name, Recovered())
                self._outcome.recovered[fault.name] = so_far + now
        self._seen = found

    async def _note_pauses(
        self,
        name: str,
        hit: frozenset[int] | None,
        window: Window,
        streams: Streams,
        shards_before: Mapping[str, frozenset[int]],
    ) -> None:
        pauses = streams.pauses(window)
        seconds = [pause.seconds for _, pause in pauses]
        self._outcome.pauses.setdefault(name, []).extend(seconds)
        self._outcome.first_waits.setdefault(name, []).extend(streams.first_waits(window))
        shards_after = await self._shards_of([stream.request_id for stream, _ in pauses])
        shards = {
            request_id: shards_before.get(request_id, frozenset()) | found
            for request_id, found in shards_after.items()
        }
        if hit is not None:
            by_shard = self._outcome.by_shard.setdefault(name, ByShard())
            for stream, pause in pauses:
                # All streams count as hit if all shards are, or the shards are not known.
                is_every = not shards or len(hit) >= self._stack.num_shards
                of = hit if is_every else shards[stream.request_id]
                by_shard.add(pause.seconds, of, hit)
        for stream, pause in reversed(pauses[-_NUM_LOGGED:]):
            where = f" of shard {sorted(shards[stream.request_id])}" if shards else ""
            self._events.log(
                f"   {stream}{where}: no message for {pause.seconds:.2f} s from "
                f"{pause.begin_s - window.begin_s:+.2f} s"
            )

    async def _shards_of(self, request_ids: Sequence[str]) -> Mapping[str, frozenset[int]]:
        """By request id; empty with one shard, or if Redis does not respond."""
        num_shards = self._stack.num_shards
        if num_shards == 1:
            return {}
        try:
            return await asyncio.to_thread(
                shards_of_requests, self._stack.redis, request_ids, num_shards
            )
        except redis.RedisError as error:
            self._events.log(f"   the streams' shards are unknown: {error}")
            return {}

    def _log_findings(self, streams: Streams, known: int) -> None:
        for stream in streams.wrong[known:]:
            for finding in stream.comparison.findings:
                self._events.log(f"   {stream}: {finding.verdict}: {finding.message}")

    def _count(self, streams: Streams) -> None:
        outcome = self._outcome
        outcome.num_requests = streams.num_finished
        outcome.num_cancelled = streams.num_cancelled
        outcome.num_tokens = streams.num_tokens
        outcome.num_wrong = {verdict: streams.count_of(verdict) for verdict in Verdict}

    def _violation(self, message: str) -> None:
        self._events.log(f"VIOLATION: {message}")
        self._outcome.violations.append(message)


async def _reference(
    client: AsyncClient,
    request: Request,
    request_id: str,
    tolerance: float,
    free: asyncio.Semaphore,
    speculation: bool | None,
) -> Reference:
    params = replace(request.params, speculation=speculation)
    async with free:
        output = await client.generate(
            request.prompt, params, request_id=request_id, timeout_s=_REFERENCE_TIMEOUT_S
        )
    return Reference(request, output, tolerance)
