"""The leadership lease in Redis; its epoch is the fencing token of every write."""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from scheduler_svc.store import scripts
from scheduler_svc.store.connection import Connection
from scheduler_svc.store.errors import LeadershipLost


@dataclass(frozen=True, slots=True)
class Leadership:
    """A fencing token and its holder's random id; every writing script checks both."""

    epoch: int
    holder: bytes  # 16 bytes


@dataclass(frozen=True, slots=True)
class StoredLeader:
    """The leader as Redis has it; holder and address are empty after a release."""

    epoch: int
    holder: bytes
    address: str


class LeaseStore:
    """Acquires, renews and releases the lease.

    An acquisition without a reply may have been executed: it is repeated with the same holder, so
    that a scheduler never waits for its own lease to expire.
    """

    def __init__(self, connection: Connection, key: str, on_acquired: Callable[[], None]) -> None:
        """`key`: that of the leadership. `on_acquired` is called before `acquire` returns one."""
        self._connection = connection
        self._on_acquired = on_acquired
        self._key = key
        self._held: Leadership | None = None
        self._next_holder = secrets.token_bytes(16)
        # Replaced whenever it is set: when the lease was acquired or released.
        self._changed = asyncio.Event()

    @property
    def held(self) -> Leadership:
        """The leadership acquired last, even if lost since. LeadershipLost if none or released."""
        if self._held is None:
            raise LeadershipLost("the lease was not acquired")
        return self._held

    def is_own(self, holder: bytes) -> bool:
        """Whether it is the holder of this store's last acquisition or of the one in progress."""
        return holder == self._next_holder or (
            self._held is not None and holder == self._held.holder
        )

    async def wait_given_up(self, holder: bytes) -> None:
        """Wait until this acquisition ends: the lease is released, or acquired again."""
        while self.is_own(holder):
            await self._changed.wait()

    async def leader(self) -> StoredLeader | None:
        """The stored leader; None if there never was one. Needs no leadership."""
        epoch, holder, address = await self._connection.execute(
            "HMGET", self._key, "epoch", "holder", "address"
        )
        if epoch is None:
            return None
        return StoredLeader(int(epoch), holder or b"", (address or b"").decode())

    async def acquire(
        self, address: str, lease_ms: int, lost_epoch: int | None = None
    ) -> Leadership | None:
        """Acquire the lease if it was released, not renewed for `lease_ms` or never held, or is
        that of `lost_epoch`, whose leader has ended; None if another scheduler holds it. From then
        on the writes of all earlier leaders are refused, so that an error about the end of a leader
        costs a pause and loses nothing.

        `address` is where gateways and standbys reach the leader.
        """
        holder = self._next_holder
        args = (holder, address, lease_ms, "" if lost_epoch is None else lost_epoch)
        epoch = await self._connection.run(scripts.ACQUIRE_LEASE, (self._key,), args)
        if not epoch:
            return None
        self._on_acquired()
        return self._hold(int(epoch), holder)

    async def reacquire(self, address: str) -> Leadership:
        """Acquire a higher epoch as a leader whose entry was or may be lost. Existing pools become
        stale; get and open them again. StaleEpoch, without effect, if another scheduler leads."""
        held, holder = self.held, self._next_holder
        args = (held.epoch, held.holder, holder, address)
        epoch = await self._connection.run(scripts.REACQUIRE_LEASE, (self._key,), args)
        return self._hold(int(epoch), holder)

    async def renew(self) -> str:
        """Extend the lease; return Redis' run id, which changes with every restart. StaleEpoch if
        another scheduler leads, LeadershipLost if the entry is missing or has a lower epoch."""
        args = (self.held.epoch, self.held.holder)
        run_id = await self._connection.run(scripts.RENEW_LEASE, (self._key,), args)
        return str(run_id.decode())

    async def release(self) -> None:
        """Free the lease for standbys; no effect if not held. Write nothing afterwards."""
        if self._held is not None:
            args = (self._held.epoch, self._held.holder)
            await self._connection.run(scripts.RELEASE_LEASE, (self._key,), args)
            self._held = None
            self._announce_change()

    def _hold(self, epoch: int, holder: bytes) -> Leadership:
        self._held = Leadership(epoch, holder)
        self._next_holder = secrets.token_bytes(16)
        self._announce_change()
        return self._held

    def _announce_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
