"""Notices the end of the leader's process by its connection, before its lease expires."""

import asyncio
from collections.abc import Callable
from enum import Enum, auto

import grpc
import structlog

from quire.internal.v1 import leadership_pb2, leadership_pb2_grpc
from quire.service.channels import INTERNAL_MESSAGE_BYTES, channel_options
from quire.service.tls import TLS, TLSError, open_aio_channel
from scheduler_svc.store.leadership import StoredLeader

log = structlog.get_logger()

# A leader whose connection broke has ended unless a new one is served within this time. A stopped
# or unreachable leader breaks no connection: its lease expires.
RECONNECT_WITHIN_S = 0.3
# Between attempts to reach a leader that was not reached yet.
RETRY_INTERVAL_S = 0.5
# A leader that is not reached for so long, though it holds the lease, has a wrong `--advertise`, or
# another TLS: gateways will not reach it, either.
UNREACHED_S = 5.0
# The status of a process that does not hold the lease.
_NOT_HOLDER = grpc.StatusCode.FAILED_PRECONDITION


class _End(Enum):
    """How watching ended."""

    # No such leader is at the address, or nothing is.
    UNREACHED = auto()
    # It led, and the connection broke.
    BROKEN = auto()
    # It led, the connection broke, and another process is at its address: this one was suspended.
    REPLACED = auto()
    # It led, and released the lease.
    GIVEN_UP = auto()


class LeaderWatch:
    """Watches one leader at a time. `on_lost` is called once, with whether its address has no
    process any more: otherwise it released the lease, or another one is there. An error about it
    costs a change of the leader and nothing else: epochs fence."""

    def __init__(self, tls: TLS | None, on_lost: Callable[[StoredLeader, bool], None]) -> None:
        # Whether the leader has responded that it leads.
        self.is_watching = False
        # Why the last attempt has not reached it.
        self._reason = "no response"
        self._tls = tls
        self._on_lost = on_lost
        self._leader: StoredLeader | None = None
        self._task: asyncio.Task[None] | None = None

    def watch(self, leader: StoredLeader) -> None:
        """Watch this leader from now on; no effect if it is watched already."""
        if leader == self._leader:
            return
        self.stop()
        self._leader = leader
        self._task = asyncio.create_task(self._watch(leader))

    def stop(self) -> None:
        """Watch no leader."""
        self._leader = None
        self.is_watching = False
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _watch(self, leader: StoredLeader) -> None:
        loop = asyncio.get_running_loop()
        warning = loop.call_later(UNREACHED_S, self._warn_unless_reached, leader)
        try:
            await self._watch_until_lost(leader)
        finally:
            warning.cancel()

    def _warn_unless_reached(self, leader: StoredLeader) -> None:
        if not self.is_watching:
            log.warning(
                "the leader is not reached",
                reason=self._reason,
                address=leader.address,
                epoch=leader.epoch,
            )

    async def _watch_until_lost(self, leader: StoredLeader) -> None:
        end = _End.UNREACHED
        # Only a process that was seen to lead can be lost: another one may have the address.
        while end is _End.UNREACHED and self._leader is leader:
            end = await self._connect_and_watch(leader, None)
            if end is _End.UNREACHED:
                await asyncio.sleep(RETRY_INTERVAL_S)
        while end is _End.BROKEN and self._leader is leader:
            end = await self._connect_and_watch(leader, RECONNECT_WITHIN_S)
        if self._leader is leader:
            self.is_watching = False
            what = (
                "the leader has released the lease"
                if end is _End.GIVEN_UP
                else "the leader has ended"
            )
            log.info(what, address=leader.address, epoch=leader.epoch)
            self._on_lost(leader, end in (_End.BROKEN, _End.UNREACHED))

    async def _connect_and_watch(self, leader: StoredLeader, within_s: float | None) -> _End:
        """As `_watch_once`, over a new channel, with the files of TLS as they are now."""
        self.is_watching = False
        self._reason = "no response"
        options = channel_options(INTERNAL_MESSAGE_BYTES)
        try:
            opened = open_aio_channel(leader.address, options, self._tls)
        except TLSError as error:
            # Files that are being replaced.
            self._reason = str(error)
            return _End.UNREACHED
        async with opened as channel:
            stub = leadership_pb2_grpc.LeadershipServiceStub(channel)
            return await self._watch_once(stub, leader, within_s)

    async def _watch_once(
        self,
        stub: "leadership_pb2_grpc.LeadershipServiceAsyncStub",
        leader: StoredLeader,
        within_s: float | None,
    ) -> _End:
        """Watch until the stream ends; `within_s` bounds its beginning."""
        call = stub.Watch(leadership_pb2.WatchRequest(holder=leader.holder))
        try:
            async with asyncio.timeout(within_s):
                self.is_watching = isinstance(await call.read(), leadership_pb2.WatchResponse)
            await call.read()
        except TimeoutError:
            return _End.UNREACHED
        except grpc.aio.AioRpcError as error:
            if self.is_watching:
                return _End.BROKEN
            is_another = within_s is not None and error.code() is _NOT_HOLDER
            return _End.REPLACED if is_another else _End.UNREACHED
        finally:
            call.cancel()
        return _End.GIVEN_UP if self.is_watching else _End.UNREACHED
