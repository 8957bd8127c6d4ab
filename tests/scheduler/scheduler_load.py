"""Requests on running schedulers, what may become of each, and a watchdog over all of them."""

import asyncio
import time
from dataclasses import dataclass, field

import redis
from ledger_worker import LedgerWorker, token_at
from scheduler_stack import CANCELLED, INTERNAL, Gateway, Heard, HeardChoice, Stack, info_of
from waiting import until

from quire.internal.v1 import scheduler_pb2
from scheduler_svc.core.sequence import seed_of_choice
from scheduler_svc.engine import Engine

# Choices of these (seed, choice) fail when they sample.
FAILING = ((900_000, 0), (900_001, 1))
# Who is answered so asks again.
PASSING = ("REDIS_AWAY", "LEAD_ENDS")

WATCHDOG_S = 8.0
POLL_S = 0.002


@dataclass(eq=False)
class Request:
    """What was asked, and what was done to it since."""

    # Which of the load's; the stream there is the attachment's.
    gateway: int
    heard: Heard
    cancelled: bool = False
    # Workers that were lost while it may have run on them.
    num_lost_workers: int = 0
    # Cuts by choice, in the order they were sent.
    cuts: dict[int, list[int]] = field(default_factory=dict)

    @property
    def attachment(self) -> int:
        return self.heard.submission.attachment

    @property
    def was_turned_away(self) -> bool:
        """It is to be asked for again."""
        failure = self.heard.failure
        return failure is not None and info_of(failure).reason in PASSING

    @property
    def over(self) -> bool:
        return self.heard.over and not self.was_turned_away

    @property
    def fails(self) -> bool:
        """One of its rows fails, unless it ends before it samples."""
        seed, choices = self.heard.seed, range(len(self.heard.choices))
        return any(seed == bad and choice in choices for bad, choice in FAILING)

    def check(self) -> None:
        """It ended as it may, with the tokens that it must have."""
        heard = self.heard
        if heard.failure is not None:
            reasons = {(CANCELLED, "CANCELLED")} if self.cancelled else set()
            reasons |= {(INTERNAL, "ROW_FAILED")} if self.fails else set()
            # Nobody can tell it from a request that kills workers.
            reasons |= {(INTERNAL, "POISON")} if self.num_lost_workers >= 2 else set()
            assert (heard.failure.code, info_of(heard.failure).reason) in reasons, heard.failure
        else:
            assert not self.fails or self.cancelled or self.cuts
        for index, choice in enumerate(heard.choices):
            output = heard.output(index)
            assert choice.token_ids == output[: len(choice.token_ids)]
            if heard.failure is None:
                self._check_end(index, choice, output)

    def _check_end(self, index: int, choice: HeardChoice, output: list[int]) -> None:
        end = choice.end
        assert end is not None
        if index in self.cuts and self._is_cut(choice, end, self.cuts[index]):
            return
        assert choice.token_ids == output
        assert end.num_tokens == len(output)
        is_stop = output[-1] in self.heard.stop_token_ids
        reason = scheduler_pb2.END_REASON_STOP_TOKEN if is_stop else scheduler_pb2.END_REASON_LENGTH
        assert end.reason == reason

    def _is_cut(self, choice: HeardChoice, end: scheduler_pb2.ChoiceEnd, cuts: list[int]) -> bool:
        """It ended because its gateway wanted no more of it."""
        if end.reason != scheduler_pb2.END_REASON_STOP_STRING:
            # Where it has begun anew, the cut came before the tokens.
            return self.heard.hears_again and end.num_tokens in cuts
        # Its record does not say where it was cut: all that there is is said again.
        is_whole = self.heard.hears_again or end.num_tokens == len(choice.token_ids)
        assert end.num_tokens in cuts or (is_whole and end.num_tokens >= min(cuts))
        return True


class Load:
    """The requests of two gateways, which ask again for what they have lost the stream of."""

    def __init__(
        self,
        stack: Stack,
        workers: list[LedgerWorker],
        max_model_len: int,
        all_patient: bool = False,
    ) -> None:
        """Every second request is patient, if not all are."""
        self.stack = stack
        self.workers = workers
        self.requests: list[Request] = []
        self.gateways: list[Gateway] = []
        self._max_model_len = max_model_len
        self._all_patient = all_patient
        self._num_submitted = 0
        self._lost_workers: list[LedgerWorker] = []
        for worker in workers:
            _spoil(worker)

    async def start(self) -> None:
        self.gateways = [await self.stack.gateway() for _ in range(2)]

    @property
    def open(self) -> list[Request]:
        return [request for request in self.requests if not request.over]

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
    ) -> None:
        length = min(length, self._max_model_len - 1)
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
            patient=self._all_patient or self._num_submitted % 2 == 0,
        )
        self.requests.append(Request(gateway, stream.heard[attachment]))

    async def cancel(self, request: Request) -> None:
        request.cancelled = True
        await self.gateways[request.gateway].cancel(request.attachment)

    async def cut(self, request: Request, choice: int, num_tokens: int) -> None:
        """As where the gateway finds a stop string behind `num_tokens` tokens."""
        request.cuts.setdefault(choice, []).append(num_tokens)
        finish = scheduler_pb2.Finish(
            attachment=request.attachment, choice=choice, num_tokens=num_tokens
        )
        await self.gateways[request.gateway].send(finishes=[finish])

    async def replace_gateway(self, index: int) -> None:
        """One goes; another comes, and asks for its requests."""
        await self.gateways[index].close()
        await self._reconnect(index)

    async def _reconnect(self, index: int) -> None:
        stream = self.gateways[index] = await self.stack.gateway()
        for request in self.open:
            if request.gateway == index:
                await self._ask_again(request, stream)

    async def _ask_again(self, request: Request, stream: Gateway) -> None:
        request.heard = stream.heard[await stream.submit_again(request.heard)]

    async def mend(self) -> None:
        """Does what gateways do whose streams have ended, and who were turned away."""
        for index, gateway in enumerate(self.gateways):
            gateway.check()
            if gateway.lost is not None:
                await self._reconnect(index)
        for request in self.requests:
            if request.was_turned_away:
                await self._ask_again(request, self.gateways[request.gateway])

    async def replace_worker(self, index: int, successor: LedgerWorker) -> None:
        """One is lost, and another one comes up at its address."""
        former, name = self.workers[index], worker_name(index)
        await self.stack.stop_worker(name)
        for request in self.open:
            request.num_lost_workers += 1
        self._lost_workers.append(former)
        _spoil(successor)
        self.workers[index] = successor
        await self.stack.start_worker(name, successor)

    async def replace_leader(self, drained: bool) -> None:
        """One dies or is drained; another one, which was there before, takes the lead."""
        former = self.stack.member
        standby = self.stack.start_scheduler()
        await until(lambda: standby.stands_by, "a standby")
        if drained:
            await former.drain()
        else:
            await former.kill()
            self.stack.lapse()
        await until(lambda: all(g.lost for g in self.gateways), "the streams' ends")
        await self.mend()

    async def empty_redis(self) -> None:
        for request in self.open:
            # Where it has ended, and nobody has heard of it, it begins anew.
            request.heard.hears_again = True
        with redis.Redis.from_url(self.stack.redis_url) as client:
            client.flushall()
        await until(lambda: all(g.lost for g in self.gateways), "the streams' ends")
        await self.mend()

    def progress(self) -> int:
        """Goes up with every plan, every token and every end."""
        count = sum(len(worker.plans) for worker in [*self.workers, *self._lost_workers])
        for request in self.requests:
            heard = request.heard
            count += heard.accepted + heard.over
            count += sum(
                len(choice.token_ids) + (choice.end is not None) for choice in heard.choices
            )
        return count

    async def pass_time(self, num_moves: int, num_turns: int = 20) -> None:
        """Until so much has moved, but no more than a number of looks."""
        target = self.progress() + num_moves
        for _ in range(num_turns):
            if self.progress() >= target:
                return
            await asyncio.sleep(POLL_S)

    async def settle(self) -> None:
        """Until every request is over. Fails when nothing moves while some are not."""
        for worker in self.workers:
            worker.gate.set()
        seen, moved_at = -1, time.monotonic()
        while self.open:
            if self.stack.serving.done():
                self.stack.serving.result()
            await self.mend()
            if (progress := self.progress()) != seen:
                seen, moved_at = progress, time.monotonic()
            assert time.monotonic() < moved_at + WATCHDOG_S, f"nothing moves: {self._state()}"
            await asyncio.sleep(POLL_S)

    async def check(self) -> None:
        """Every request ended as it should, and nothing is left of any."""
        for request in self.requests:
            request.check()
        engine = self.engine
        joined = {worker.hello.incarnation for worker in self.workers}
        await until(lambda: engine.lanes.keys() == joined, "the lanes of all workers")
        await until(lambda: not engine.live, "the end of those whose gateways have gone")
        await until(lambda: all(lane.is_empty for lane in engine.lanes.values()), "empty lanes")
        await until(lambda: not any(w.rows for w in self.workers), "the release of all rows")
        for worker in self.workers:
            await worker.check()
            lane = engine.lanes[worker.hello.incarnation]
            assert lane.num_free_blocks == worker.hello.num_blocks - 1
            assert lane.roster.host_blocks.num_free == worker.hello.num_host_blocks
            await lane.check_integrity()
        for worker in self._lost_workers:
            assert not worker.runner.ledger.violations
        assert not engine.waiting
        assert engine.waiting.num_tokens == 0

    def _state(self) -> str:
        lanes = [
            f"lane {lane.worker.incarnation}: {lane.num_free_blocks} blocks free, "
            f"rows {[one.sequence_id for one in lane.rows]}, "
            f"assigned {[one.sequence_id for one in lane.assigned]}, "
            f"late {[one.sequence_id for one in lane.roster.late]}, "
            f"parents {[(g.attachment, g.hold) for g in lane.roster.parents]}, "
            f"{lane.num_swapped} swapped, {len(lane._flights)} in flight"
            for lane in self.engine.lanes.values()
        ]
        waiting = [sequence.sequence_id for sequence in self.engine.waiting]
        violations = [worker.runner.ledger.violations for worker in self.workers]
        return f"{len(self.open)} open; waiting {waiting}; {lanes}; {violations}"


def worker_name(index: int) -> str:
    return f"w{index}"


def _spoil(worker: LedgerWorker) -> None:
    worker.failing_seeds.update(seed_of_choice(*failing) for failing in FAILING)
