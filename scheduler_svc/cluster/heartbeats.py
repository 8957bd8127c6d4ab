"""Which schedulers run, by their heartbeats in Redis and by connections that broke."""

from collections.abc import Callable, Mapping

from scheduler_svc.store.cluster import ClusterReading

HEARTBEAT_S = 0.25
# When Redis was unavailable, or has lost writes, the schedulers that were known count for so long
# without a heartbeat: they all have to reach it again.
RETURN_S = 2.0


class Heartbeats:
    """The last reading of all heartbeats, and what is known since then."""

    def __init__(
        self, own_id: str, own_address: str, expiry_s: float, clock: Callable[[], float]
    ) -> None:
        """`expiry_s`: time without a heartbeat after which a scheduler counts as ended."""
        # The addresses of the schedulers that run, by id; another mapping after each change.
        self.members: Mapping[str, str] = {own_id: own_address}
        # None before the first one.
        self._reading: ClusterReading | None = None
        # Empty once this scheduler drains.
        self.own_address = own_address
        self._own_id = own_id
        self._expiry_s = expiry_s
        self._clock = clock
        # When the reading was taken, by `clock`.
        self._read_at = 0.0
        # By address, the time by Redis' clock at which a scheduler's process had ended.
        self._ended: dict[str, int] = {}
        # Until then absent schedulers count, by `clock`.
        self._returned_by = 0.0

    @property
    def now_ms(self) -> int:
        """The time by Redis' clock; 0 before the first reading."""
        if self._reading is None:
            return 0
        return self._reading.now_ms + round((self._clock() - self._read_at) * 1000)

    def has_expired(self, written_ms: int) -> bool:
        """Whether what was written at this time, by Redis' clock, has expired at the last reading.
        Also what is as far in the future: the clock was set back since."""
        if self._reading is None:
            return False
        return abs(self._reading.now_ms - written_ms) > self._expiry_s * 1000

    def take(self, reading: ClusterReading) -> None:
        """Take a reading that was just made."""
        if self._is_disturbed(reading):
            self._returned_by = self._clock() + RETURN_S
        self._reading, self._read_at = reading, self._clock()
        self._find_members(reading)

    def mark_ended(self, address: str) -> bool:
        """The process at this address has ended: it counts no more, until it sends a heartbeat.
        False before the first reading, which does not know the process."""
        if self._reading is None:
            return False
        # Its last heartbeat may be younger than the reading, or still be on its way to Redis.
        self._ended[address] = self.now_ms + round(HEARTBEAT_S * 1000)
        self._find_members(self._reading)
        return True

    def has_ended(self, address: str, since_ms: int = 0) -> bool:
        """Whether the process that has run at this address since then is known to have ended."""
        return since_ms <= self._ended.get(address, -1)

    def leave(self) -> bool:
        """This scheduler drains and counts no more. False before the first reading."""
        self.own_address = ""
        if self._reading is None:
            return False
        self._find_members(self._reading)
        return True

    def has_sent_since(self, name: str, since_ms: int) -> bool:
        """Whether this scheduler has sent a heartbeat after this time, by Redis' clock."""
        heartbeat = None if self._reading is None else self._reading.schedulers.get(name)
        return heartbeat is not None and heartbeat.written_ms > since_ms

    def load_age_ms(self, shard: int) -> float | None:
        """The time since the load of a shard was written; None if it was not. Absolute: Redis'
        clock may have been set back."""
        if self._reading is None or shard not in self._reading.loads:
            return None
        return abs(self.now_ms - self._reading.loads[shard].written_ms)

    def _is_disturbed(self, reading: ClusterReading) -> bool:
        """Whether since the last reading Redis was unavailable, has lost writes, or has got another
        time: a scheduler that is absent may have had no time for a heartbeat."""
        if self._reading is None:
            return False
        half_ms = self._expiry_s * 1000 / 2
        has_lost_writes = any(
            name not in reading.schedulers and reading.now_ms - timed.written_ms < half_ms
            for name, timed in self._reading.schedulers.items()
        )
        return has_lost_writes or abs(reading.now_ms - self._reading.now_ms) > half_ms

    def _find_members(self, reading: ClusterReading) -> None:
        known = {
            name: (timed.value.decode(), timed.written_ms)
            for name, timed in reading.schedulers.items()
        }
        if self._clock() < self._returned_by:
            kept = {name: (address, reading.now_ms) for name, address in self.members.items()}
            known = {**kept, **known}
        known.pop(self._own_id, None)
        self._ended = {
            address: ended_ms
            for address, ended_ms in self._ended.items()
            # By another clock, it would hold for too long.
            if ended_ms - reading.now_ms < self._expiry_s * 1000
            and any(address == other and at <= ended_ms for other, at in known.values())
        }
        members = {
            name: address
            for name, (address, at) in known.items()
            if address and at > self._ended.get(address, 0)
        }
        if self.own_address:
            members[self._own_id] = self.own_address
        if members != self.members:
            self.members = members
