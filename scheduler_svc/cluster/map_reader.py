"""Reads the map of the cluster in Redis, and makes up for one that is lost or not readable."""

from collections.abc import Iterable
from dataclasses import replace

import structlog

from scheduler_svc.cluster.cluster_map import MAX_SHARDS, ClusterMap
from scheduler_svc.store.keys import ClusterKeys

log = structlog.get_logger()


class MapReader:
    """The map of one scheduler: the newest that was read.

    The number of shards never falls. If no map was read yet, the loads in Redis show which shards
    there are: the leader of each has written one. Without them a map that cannot be read is
    refused, since requests of other shards would be lost with a smaller number.
    """

    def __init__(self) -> None:
        self.map = ClusterMap()
        # Redis has no map, or one that cannot be read, though there must have been one.
        self.is_lost = False
        # Why this scheduler must not lead any shard; None if it may.
        self.problem: str | None = None
        # What could not be read last.
        self._unreadable: bytes | None = None
        # What was read last, and the map in it: it is parsed when it changes.
        self._last: tuple[bytes, ClusterMap] | None = None

    def read(self, packed: bytes | None, shards: Iterable[int]) -> None:
        """Take the map that Redis has; `shards` are those with a load."""
        num_seen = 1 + max((shard for shard in shards if 0 <= shard < MAX_SHARDS), default=-1)
        stored = None if packed is None else self._parse(packed)
        # A map that is older was restored after lost writes; its writer writes again.
        if stored is not None and stored.version > self.map.version:
            self.map = replace(stored, num_shards=max(stored.num_shards, self.map.num_shards))
        is_new = self.map == ClusterMap()
        self.is_lost = stored is None and not (packed is None and is_new and num_seen <= 1)
        self.problem = None
        if stored is None and packed is not None and is_new and not num_seen:
            self.problem = (
                f"the map of the cluster, the key {ClusterKeys().map} in Redis, is not readable; "
                "restore it, or delete it and set the number of shards by `quire shards`"
            )
        elif num_seen > self.map.num_shards:
            log.warning("the map of the cluster has lost shards", shards=num_seen)
            self.map = replace(self.map, num_shards=num_seen)

    def use(self, following: ClusterMap) -> bool:
        """Use another map, unless it is older; return whether it is used."""
        is_newer = following.version > self.map.version
        if is_newer:
            self.map = following
        return is_newer

    def _parse(self, packed: bytes) -> ClusterMap | None:
        if self._last is not None and self._last[0] == packed:
            return self._last[1]
        try:
            parsed = ClusterMap.parse(packed)
            self._last = packed, parsed
            return parsed
        except ValueError as error:
            if packed != self._unreadable:
                # Logged once, not at every heartbeat.
                self._unreadable = packed
                log.error(
                    "the map of the cluster is not readable",
                    key=ClusterKeys().map,
                    reason=str(error),
                )
            return None
