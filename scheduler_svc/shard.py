"""One shard in this process: stands by for its lease, leads it for a term, hands it over."""

import asyncio
import contextlib
from collections.abc import Awaitable, Iterator
from typing import TypeVar

import structlog

from quire.service.lifecycle import Signals
from scheduler_svc.gateway.frame_handler import FrameHandler
from scheduler_svc.leadership.lease import Lease, WritesLost
from scheduler_svc.leadership.standby import Standby
from scheduler_svc.process import Process
from scheduler_svc.recovery import RecoveredState, recover, rewrite
from scheduler_svc.store.errors import LeadershipLost, RecordMismatch, StaleEpoch, StoreError
from scheduler_svc.store.leadership import LeaseStore
from scheduler_svc.store.store import Store
from scheduler_svc.term import Term

log = structlog.get_logger()

_Result = TypeVar("_Result")

# How long a gateway waits for the term of a shard that this process should lead, before it is
# refused. Below the gateway's timeout for a hello.
HANDLER_WITHIN_S = 0.5


class Shard:
    """A shard, led by this process or another one. `run` returns after a drain, or raises an
    unexpected error."""

    def __init__(self, number: int, process: Process, signals: Signals) -> None:
        settings = process.settings
        self.number = number
        self.standby: Standby
        self.term: Term | None = None
        self._process = process
        self._signals = signals
        self._store = Store.at(settings.redis_url, settings.redis_password, number, process.retry)
        process.stores[number] = self._store
        self.standby = Standby(
            self._store.lease,
            process.address,
            settings.lease_s,
            settings.peer_tls,
            process.membership,
            number,
        )
        # While `term` is set.
        self._has_term = asyncio.Event()
        # Set when the signal to drain arrives, or the shard is given to another scheduler.
        self._must_end = asyncio.Event()
        # The version of the map at the beginning of the term: the scheduler that it names has not
        # taken the shard.
        self._led_since = 0
        self._log = log.bind(shard=number)

    @property
    def lease(self) -> LeaseStore:
        return self._store.lease

    @property
    def handler(self) -> FrameHandler | None:
        """That of the term; None while this process does not lead the shard."""
        return None if self.term is None else self.term.handler

    async def handler_soon(self) -> FrameHandler | None:
        """The term's handler. If this process should lead the shard but has no term yet, wait for
        one, up to HANDLER_WITHIN_S."""
        if self.term is None and self._process.membership.is_owner(self.number):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HANDLER_WITHIN_S):
                    await self._has_term.wait()
        return self.handler

    async def run(self) -> None:
        """Alternate between standby and terms until the first signal."""
        membership = self._process.membership
        membership.listen(self._check_owner)
        try:
            await self._run_terms()
        finally:
            membership.stop_listening(self._check_owner)
            await self._store.close()

    async def _run_terms(self) -> None:
        state: RecoveredState | None = None
        while not self._signals.drain.is_set():
            if state is None:
                leadership = await self._unless_drained(self.standby.acquire())
            else:
                leadership = await self._unless_drained(self.standby.reacquire())
            if leadership is None:
                state = None
                continue
            self._log.info("leading", epoch=leadership.epoch)
            state = await self._lead(state)

    def _check_owner(self) -> None:
        if self._process.membership.should_hand_over(self.number, self._led_since):
            self._must_end.set()

    async def _lead(self, previous: RecoveredState | None) -> RecoveredState | None:
        """Lead for one term, with the previous state, or else with that of Redis. Returns the state
        to continue with if Redis lost writes; None if another scheduler leads or after the end."""
        store = self._store
        lease = Lease(store.lease, self._process.settings.lease_s)
        term: Term | None = None
        is_stale = has_lost_writes = False
        self._led_since = self._process.membership.map.version
        self._must_end.clear()
        try:
            async with asyncio.TaskGroup() as group:
                renewing = group.create_task(lease.run())
                recovered = await store.retry(
                    lambda: recover(store) if previous is None else rewrite(store, previous)
                )
                term = Term(self._process, self.number, store, lease, recovered)
                await self._run_term(term)
                renewing.cancel()
        except* StaleEpoch as errors:
            self._log.warning("another scheduler leads", reason=str(next(leaves(errors))))
            is_stale = True
        except* (LeadershipLost, WritesLost, RecordMismatch) as errors:
            self._log.warning("Redis may have lost writes", reason=str(next(leaves(errors))))
            has_lost_writes = True
            store.reopen()
        finally:
            # Buffered frames are sent while the lease is still held.
            membership = self._process.membership
            # A leader that was replaced does not know by which scheduler.
            self._stop_term(term, "" if is_stale else membership.owner_address(self.number))
        if term is not None and not (is_stale or has_lost_writes):
            has_lost_writes = not await self._release(term)
        lease.end()
        if is_stale or not has_lost_writes:
            return None
        return previous if term is None else term.export_state()

    async def _run_term(self, term: Term) -> None:
        self.term = term
        self._has_term.set()
        self._process.membership.lead(self.number, term.participation.load)
        work = asyncio.create_task(term.run())
        ending = asyncio.create_task(self._wait_end())
        try:
            await asyncio.wait({work, ending}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            else:
                await self._signals.drain_within(
                    lambda: self._hand_over(term, work), self._process.settings.drain_grace_s
                )
        finally:
            for task in (work, ending):
                task.cancel()
            await asyncio.gather(work, ending, return_exceptions=True)

    async def _wait_end(self) -> None:
        """Wait until the term must end: by the first signal, or by the map."""
        self._check_owner()
        await self._unless_drained(self._must_end.wait())

    async def _hand_over(self, term: Term, work: asyncio.Task[None]) -> None:
        """Wait until the steps in flight are complete and delivered. Errors of `work` are raised:
        what they say of Redis decides whether the state may be written there."""
        self._log.info("draining", requests=len(term.engine.live))
        term.halt()
        await asyncio.wait({work})
        if not work.cancelled():
            work.result()

    async def _release(self, term: Term) -> bool:
        """Write all state to Redis and release the lease; return False if Redis has lost writes."""
        try:
            await term.flush()
            await self._store.lease.release()
        except StoreError as error:
            self._log.warning("the lease is not released", reason=str(error))
            return not isinstance(error, LeadershipLost | RecordMismatch)
        return True

    def _stop_term(self, term: Term | None, successor: str) -> None:
        self.term = None
        self._has_term.clear()
        self._process.membership.stop_leading(self.number)
        self.standby.leader_address = successor
        if term is not None:
            term.handler.close(successor)

    async def _unless_drained(self, work: Awaitable[_Result]) -> _Result | None:
        """Wait for the work; None, with the work cancelled, if the first signal arrives before."""
        task = asyncio.ensure_future(work)
        drain = asyncio.create_task(self._signals.drain.wait())
        try:
            await asyncio.wait({task, drain}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            task.cancel()
            drain.cancel()


def leaves(errors: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    """Iterate over the errors of a group and of the groups within it."""
    for error in errors.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from leaves(error)
        else:
            yield error
