"""The right to write: an epoch, held by a lease."""

import secrets
from dataclasses import dataclass
from typing import Any

from scheduler_svc.store import scripts
from scheduler_svc.store.connection import Connection
from scheduler_svc.store.errors import LeadLost
from scheduler_svc.store.keys import LEADERSHIP

_STORED = ("epoch", "holder", "address", "renewed_ms")


@dataclass(frozen=True, slots=True)
class Leadership:
    """A fencing number and its holder's random id; every writing script demands both."""

    epoch: int
    holder: bytes  # 16 bytes


@dataclass(frozen=True, slots=True)
class Leader:
    """Who is stored as the leader."""

    epoch: int
    holder: bytes  # empty: the lead was released
    address: str
    idle_ms: int | None  # by Redis' clock, since the last renewal; None: the lead was released
    run_id: str  # Redis' own


@dataclass(frozen=True, slots=True)
class Renewal:
    """What a leader hears when it has renewed."""

    run_id: str  # Redis' own: another one after every restart


class Lease:
    """Taking, keeping and leaving the lead.

    A take without an answer may have been carried out: it is repeated with the same holder, so
    that nobody waits for his own lease to run out.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._held: Leadership | None = None
        self._next_holder = secrets.token_bytes(16)

    @property
    def held(self) -> Leadership:
        """The leadership taken last and not released. LeadLost if there is none."""
        if self._held is None:
            raise LeadLost("the lead was not taken")
        return self._held

    async def leader(self) -> Leader | None:
        stored, now, server = await self._connection.snapshot(
            ("HMGET", LEADERSHIP, *_STORED), ("TIME",), ("INFO", "server")
        )
        epoch, holder, address, renewed_ms = stored
        if epoch is None:
            return None
        return Leader(
            epoch=int(epoch),
            holder=holder or b"",
            address=(address or b"").decode(),
            idle_ms=None if holder is None else _ms(now) - int(renewed_ms),
            run_id=_run_id(server),
        )

    async def take(self, address: str, lease_ms: int) -> Leadership | None:
        holder = self._next_holder
        args = (holder, address, lease_ms)
        epoch = await self._connection.run(scripts.TAKE_LEAD, (LEADERSHIP,), args)
        return self._hold(int(epoch), holder) if epoch else None

    async def retake(self, address: str) -> Leadership:
        held, holder = self.held, self._next_holder
        args = (held.epoch, held.holder, holder, address)
        epoch = await self._connection.run(scripts.RETAKE_LEAD, (LEADERSHIP,), args)
        return self._hold(int(epoch), holder)

    async def renew(self) -> Renewal:
        held = self.held
        args = (held.epoch, held.holder)
        run_id = await self._connection.run(scripts.RENEW_LEAD, (LEADERSHIP,), args)
        return Renewal(run_id.decode())

    async def release(self) -> None:
        if self._held is not None:
            args = (self._held.epoch, self._held.holder)
            await self._connection.run(scripts.RELEASE_LEAD, (LEADERSHIP,), args)
            self._held = None

    def _hold(self, epoch: int, holder: bytes) -> Leadership:
        self._held = Leadership(epoch, holder)
        self._next_holder = secrets.token_bytes(16)
        return self._held


def _run_id(server: bytes) -> str:
    """Of the lines of Redis' INFO."""
    [run_id] = [line[7:] for line in server.decode().splitlines() if line.startswith("run_id:")]
    return run_id


def _ms(time: Any) -> int:
    """Of Redis' TIME: seconds and microseconds."""
    seconds, microseconds = time
    return int(seconds) * 1000 + int(microseconds) // 1000
