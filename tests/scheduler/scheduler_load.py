"""Requests on running schedulers, their permitted results, and a watchdog over all of them."""

import asyncio
import time
from dataclasses import dataclass, field

import redis
from beam_requests import ReceivedSearch, submit_search
from checking_worker import Broken, CheckingWorker, token_at
from scheduler_stack import (
    CANCELLED,
    INTERNAL,
    Gateway,
    Received,
    ReceivedChoice,
    Stack,
    info_of,
    num_in_flight,
)
from waiting import until

from quire.internal.v1 import scheduler_pb2, worker_pb2
from scheduler_svc.core.crashes import MAX_CONCLUSIVE
from scheduler_svc.core.request import seed_of_choice
from scheduler_svc.engine.engine import Engine

INVALID_ARGUMENT, FAILED_PRECONDITION = 3, 9

# Choices of these (seed, choice) fail when they sample.
FAILING = ((900_000, 0), (900_001, 1))
# A request refused with one of these is submitted again; the last one if Redis was emptied.
PASSING = ("REDIS_AWAY", "LEAD_ENDS", "UNKNOWN_REQUEST")

WATCHDOG_S = 8.0
POLL_S = 0.002


@dataclass(eq=False)
class Request:
    """A submission and the events that affected it since."""

    # Index in the load's gateways.
    gateway: int
    received: Received
    cancelled: bool = False
    # Workers that were lost while it may have run on them.
    num_lost_workers: int = 0
    # Cuts by choice, in the order they were sent.
    cuts: dict[int, list[int]] = field(default_factory=dict)
    # Codes and reasons of errors that the workers' sizes may cause.
    limits: set[tuple[int, str]] = field(default_factory=set)

    @property
    def attachment(self) -> int:
        return self.received.submission.attachment

    @property
    def was_refused(self) -> bool:
        """Whether it must be submitted again."""
        failure = self.received.failure
        return failure is not None and info_of(failure).reason in PASSING

    @property
    def is_ended(self) -> bool:
        return self.received.is_ended and not self.was_refused

    @property
    def fails(self) -> bool:
        """Whether one of its rows fails, unless it ends before it samples."""
        seed, choices = self.received.seed, range(len(self.received.choices))
        return any(seed == bad and choice in choices for bad, choice in FAILING)

    def check(self) -> None:
        """Assert a permitted end and the expected tokens."""
        received = self.received
        if received.failure is not None:
            reasons = {(CANCELLED, "CANCELLED")} if self.cancelled else set()
            reasons |= self.limits
            reasons |= {(INTERNAL, "ROW_FAILED")} if self.fails else set()
            # It cannot be distinguished from a request that kills workers.
            num_evident = 1 + MAX_CONCLUSIVE
            reasons |= {(INTERNAL, "POISON")} if self.num_lost_workers >= num_evident else set()
            assert (received.failure.code, info_of(received.failure).reason) in reasons, (
                received.failure
            )
        else:
            assert not self.fails or self.cancelled or self.cuts
        for index, choice in enumerate(received.choices):
            output = received.output(index)
            assert choice.token_ids == output[: len(choice.token_ids)]
            if received.failure is None:
                self._check_end(index, choice, output)

    def _check_end(self, index: int, choice: ReceivedChoice, output: list[int]) -> None:
        end = choice.end
        assert end is not None
        if isinstance(self.received, ReceivedSearch):
            assert choice.token_ids == output
            return
        if index in self.cuts and self._is_cut(choice, end, self.cuts[index]):
            return
        assert choice.token_ids == output
        assert end.num_tokens == len(output)
        is_stop = output[-1] in self.received.stop_token_ids
        reason = scheduler_pb2.END_REASON_STOP_TOKEN if is_stop else scheduler_pb2.END_REASON_LENGTH
        assert end.reason == reason

    def _is_cut(
        self, choice: ReceivedChoice, end: scheduler_pb2.ChoiceEnd, cuts: list[int]
    ) -> bool:
        """Whether it ended because its gateway finished it."""
        if end.reason != scheduler_pb2.END_REASON_STOP_STRING:
            # After a restart the cut may precede the tokens.
            return self.received.is_redelivered and end.num_tokens in cuts
        # Its record does not store the cut: all its tokens are delivered again.
        is_whole = self.received.is_redelivered or end.num_tokens == len(choice.token_ids)
        assert end.num_tokens in cuts or (is_whole and end.num_tokens >= min(cuts))
        return True


class Load:
    """The requests of two gateways, which resubmit requests whose stream is lost."""

    def __init__(
        self,
        stack: Stack,
        workers: list[CheckingWorker],
        max_model_len: int,
        all_unary: bool = False,
    ) -> None:
        """Every second request is unary, or all are."""
        self.stack = stack
        self.workers = workers
        self.requests: list[Request] = []
        self.gateways: list[Gateway] = []
        self._max_model_len = max_model_len
        self._all_unary = all_unary
        self._num_submitted = 0
        self._lost_workers: list[CheckingWorker] = []
        for worker in workers:
            _add_failing_seeds(worker)

    async def start(self) -> None:
        self.gateways = [await self.stack.gateway() for _ in range(2)]

    @property
    def open(self) -> list[Request]:
        return [request for request in self.requests if not request.is_ended]

    @property
    def engine(self) -> Engine:
        return self.stack.engine

    async def submit(
        self,
        gateway: int,
        length: int,
        tag: int,
        max_tokens: int,
        seed: int,
        stop_at: int | None,
        n: int,
        priority: int,
        num_logprobs: int,
        principal: str = "",
        num_prompt_logprobs: int = 0,
        num_lookahead_tokens: int = 0,
        without_drafts: bool = False,
        beam_width: int = 0,
    ) -> None:
        length = min(length, self._max_model_len - 1)
        if beam_width:
            await self._submit_search(gateway, length, tag, max_tokens, seed, beam_width, principal)
            return
        stop = () if stop_at is None else (token_at(seed, length + stop_at),)
        self._num_submitted += 1
        stream = self.gateways[gateway]
        attachment = await stream.submit(
            [tag * 100 + index for index in range(length)],
            max_tokens=min(max_tokens, self._max_model_len - length),
            seed=seed,
            request_id=f"request-{self._num_submitted}",
            stop_token_ids=stop,
            n=n,
            priority=priority,
            num_logprobs=num_logprobs,
            num_prompt_logprobs=num_prompt_logprobs,
            num_lookahead_tokens=num_lookahead_tokens,
            without_drafts=without_drafts,
            principal=principal,
            tenant={"weight": len(principal)} if principal else None,
            deferred_delivery=self._all_unary or self._num_submitted % 2 == 0,
        )
        self.requests.append(Request(gateway, stream.received[attachment]))

    async def _submit_search(
        self,
        gateway: int,
        length: int,
        tag: int,
        max_tokens: int,
        seed: int,
        width: int,
        principal: str,
    ) -> None:
        self._num_submitted += 1
        stream = self.gateways[gateway]
        attachment = await submit_search(
            stream,
            [tag * 100 + index for index in range(length)],
            width,
            min(max_tokens, self._max_model_len - length),
            seed,
            request_id=f"request-{self._num_submitted}",
            principal=principal,
            tenant={"weight": len(principal)} if principal else None,
            deferred_delivery=self._all_unary or self._num_submitted % 2 == 0,
            by_token=False,
        )
        received = stream.received[attachment]
        self.requests.append(Request(gateway, received, limits=self._search_limits(received)))

    def _search_limits(self, received: Received) -> set[tuple[int, str]]:
        """Why a search may be refused or fail: it has more beams than a worker has rows, or they
        may need more blocks than one has."""
        width = received.submission.params.beam_width
        num_tokens = received.num_prompt_tokens + received.max_tokens
        limits = set()
        for worker in self.workers:
            hello = worker.hello
            if width > hello.max_num_seqs:
                limits.add((INVALID_ARGUMENT, "BEAM_WIDTH_OUT_OF_RANGE"))
            # With the largest look-ahead.
            if width * -(-(num_tokens + 5) // hello.block_size) >= hello.num_blocks:
                limits.add((FAILED_PRECONDITION, "CACHE_TOO_SMALL"))
        return limits

    async def cancel(self, request: Request) -> None:
        request.cancelled = True
        await self.gateways[request.gateway].cancel(request.attachment)

    async def cut(self, request: Request, choice: int, num_tokens: int) -> None:
        """Finish a choice as if a stop string was found after `num_tokens` tokens."""
        request.cuts.setdefault(choice, []).append(num_tokens)
        finish = scheduler_pb2.Finish(
            attachment=request.attachment, choice=choice, num_tokens=num_tokens
        )
        await self.gateways[request.gateway].send(finishes=[finish])

    async def replace_gateway(self, index: int) -> None:
        """Replace a gateway by another one, which resubmits its requests."""
        await self.gateways[index].close()
        await self._reconnect(index)

    async def _reconnect(self, index: int) -> None:
        stream = self.gateways[index] = await self.stack.gateway()
        for request in self.open:
            if request.gateway == index:
                await self._resubmit(request, stream)

    async def _resubmit(self, request: Request, stream: Gateway) -> None:
        request.received = stream.received[await stream.submit_again(request.received)]

    async def resubmit(self) -> None:
        """Reconnect gateways whose streams have ended, and resubmit refused requests."""
        for index, gateway in enumerate(self.gateways):
            gateway.check()
            if gateway.lost is not None:
                await self._reconnect(index)
        for request in self.requests:
            if request.was_refused:
                await self._resubmit(request, self.gateways[request.gateway])

    async def replace_worker(self, index: int, successor: CheckingWorker) -> None:
        """Stop a worker, and start another one at its address."""
        lost, name = self.workers[index], worker_name(index)
        await self.stack.stop_worker(name)
        for request in self.open:
            request.num_lost_workers += 1
        self._lost_workers.append(lost)
        _add_failing_seeds(successor)
        self.workers[index] = successor
        await self.stack.start_worker(name, successor)

    def lose_result(self, index: int) -> None:
        """Let a worker break its stream after its next step, without the result. The process stays,
        with its cache."""
        worker = self.workers[index]

        def lose(result: worker_pb2.StepResult) -> None:
            worker.distort = lambda result: None
            for request in self.open:
                request.num_lost_workers += 1
            raise Broken

        worker.distort = lose

    async def move_stream(self, request: Request, gateway: int, client_gone: bool) -> None:
        """Detach a request, and attach to it at a gateway, which may be the same one."""
        await self.gateways[request.gateway].detach(request.attachment, client_gone)
        request.gateway, stream = gateway, self.gateways[gateway]
        request.received = stream.received[await stream.attach_again(request.received)]

    async def replace_leader(self, drained: bool) -> None:
        """Kill or drain the leader; a standby that is already running takes over."""
        leader = self.stack.member
        standby = self.stack.start_scheduler()
        await until(lambda: standby.is_standby, "a standby")
        if drained:
            await leader.drain()
        else:
            await leader.kill()
            self.stack.expire_lease(leader)
        await until(lambda: all(g.lost for g in self.gateways), "the streams' ends")
        await self.resubmit()

    async def empty_redis(self) -> None:
        for request in self.open:
            # A request whose end was not delivered starts again.
            request.received.is_redelivered = True
        with redis.Redis.from_url(self.stack.redis_url) as client:
            client.flushall()
        await until(lambda: all(g.lost for g in self.gateways), "the streams' ends")
        await self.resubmit()

    def progress(self) -> int:
        """A counter that increases with every plan, every token and every end."""
        count = sum(len(worker.plans) for worker in [*self.workers, *self._lost_workers])
        for request in self.requests:
            received = request.received
            count += received.accepted + received.is_ended
            count += sum(
                len(choice.token_ids) + (choice.end is not None) for choice in received.choices
            )
        return count

    async def pass_time(self, num_moves: int, num_polls: int = 20) -> None:
        """Wait for progress by `num_moves`, at most for `num_polls` polls."""
        target = self.progress() + num_moves
        for _ in range(num_polls):
            if self.progress() >= target:
                return
            await asyncio.sleep(POLL_S)

    async def finish(self) -> None:
        """Wait until every request is over. Fails if there is no progress before that."""
        for worker in self.workers:
            worker.stop_draining()
            worker.gate.set()
        seen, moved_at = -1, time.monotonic()
        while self.open:
            if self.stack.serving.done():
                self.stack.serving.result()
            await self.resubmit()
            if (progress := self.progress()) != seen:
                seen, moved_at = progress, time.monotonic()
            assert time.monotonic() < moved_at + WATCHDOG_S, f"no progress: {self._state()}"
            await asyncio.sleep(POLL_S)

    async def check(self) -> None:
        """Assert that every request ended as it should and holds no resources."""
        for request in self.requests:
            request.check()
        engine = self.engine
        joined = {worker.hello.incarnation for worker in self.workers}
        await until(lambda: engine.lanes.keys() == joined, "the lanes of all workers")
        await until(lambda: not engine.live, "the end of requests without a gateway")
        await until(lambda: all(lane.is_empty for lane in engine.lanes.values()), "empty lanes")
        await until(lambda: not any(w.rows for w in self.workers), "the release of all rows")
        for worker in self.workers:
            await worker.check()
            lane = engine.lanes[worker.hello.incarnation]
            assert lane.num_free_blocks == worker.hello.num_blocks - 1
            assert lane.table.swap_space.num_free == worker.hello.num_host_blocks
            await lane.check_integrity()
        for worker in self._lost_workers:
            assert not worker.runner.kv_checker.violations
        assert not engine.waiting
        assert engine.waiting.num_tokens == 0
        for usage in engine.quotas._usage.values():
            assert usage.num_live == usage.num_resumable == usage.num_reserved_tokens == 0

    def _state(self) -> str:
        lanes = [
            f"lane {lane.worker.incarnation}: {lane.num_free_blocks} blocks free, "
            f"rows {[one.sequence_id for one in lane.rows]}, "
            f"assigned {[one.sequence_id for one in lane.assigned]}, "
            f"awaiting results {[one.sequence_id for one in lane.table.awaiting_results]}, "
            f"forking {[(g.attachment, g.pinned_blocks) for g in lane.table.forking_groups]}, "
            f"{lane.num_swapped} swapped, {num_in_flight(lane)} in flight"
            for lane in self.engine.lanes.values()
        ]
        waiting = [sequence.sequence_id for sequence in self.engine.waiting]
        violations = [worker.runner.kv_checker.violations for worker in self.workers]
        return f"{len(self.open)} open; waiting {waiting}; {lanes}; {violations}"


def worker_name(index: int) -> str:
    return f"w{index}"


def _add_failing_seeds(worker: CheckingWorker) -> None:
    worker.failing_seeds.update(seed_of_choice(*failing) for failing in FAILING)
