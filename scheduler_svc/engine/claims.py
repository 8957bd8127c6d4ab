"""Keeps ids that clients chose unique over all shards."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from scheduler_svc.cluster.membership import Membership
from scheduler_svc.core.sequence import Group
from scheduler_svc.store.errors import StoreError
from scheduler_svc.store.id_directory import Claim, IdDirectory
from scheduler_svc.store.requests import RequestKey
from scheduler_svc.store.store import Store

# A claim outlives the record of its request, which may run for as long as it is renewed.
_LIFETIME_S = 3600
_RENEWAL_S = 1200.0
_RETRY_S = 1.0


class Claims:
    """The claims of one shard. A single shard makes none until there are to be more."""

    def __init__(
        self,
        directory: IdDirectory,
        store: Store,
        shard: int,
        membership: Membership,
        live: Mapping[RequestKey, Group],
        finished_ttl_s: int,
    ) -> None:
        """`live`: the shard's live requests."""
        self._directory = directory
        self._store = store
        self.shard = shard
        self._membership = membership
        self._live = live
        self._ttl_s = finished_ttl_s + _LIFETIME_S
        # The map was read since this leader leads: an earlier one may have just added shards.
        self._is_map_current = False
        # Other shards are about to begin.
        self._is_begun = False
        # Set when the requests that are being recorded are.
        self._recordings: set[asyncio.Event] = set()

    @property
    def is_needed(self) -> bool:
        """Whether another shard may have the id of a new request."""
        is_alone = self._is_map_current and self._membership.map.num_shards == 1
        return self._is_begun or not is_alone

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Note that new requests are claimed, if that is needed, and recorded meanwhile."""
        is_recorded = asyncio.Event()
        self._recordings.add(is_recorded)
        try:
            yield
        finally:
            self._recordings.remove(is_recorded)
            is_recorded.set()

    async def claim(self, keys: Sequence[RequestKey]) -> list[int]:
        """Claim the ids of new requests; return the shard that has each one. Raises StoreError."""
        found = await self._directory.claim(keys, self.shard, self._ttl_s, Claim.NEW)
        return [self.shard if shard is None else shard for shard in found]

    async def give(self, keys: Sequence[RequestKey], shard: int) -> None:
        """Note that these requests move to another shard, if their ids are claimed at all. Raises
        StoreError."""
        await self._directory.claim(keys, shard, self._ttl_s, Claim.KNOWN)

    async def claim_all(self) -> None:
        """Claim the ids of all requests of this shard, from now on also of new ones: other shards
        are about to begin. Ids that other shards have by now stay theirs. Raises StoreError."""
        self._is_begun = True
        # Without claims: their records may be stored after the scan has passed them.
        for is_recorded in list(self._recordings):
            await is_recorded.wait()
        keys = await self._store.stored_requests()
        # What a single shard finds claimed is left from requests that are gone.
        is_single = self._membership.map.num_shards == 1
        which = Claim.ALL if is_single else Claim.NEW
        await self._directory.claim(keys, self.shard, self._ttl_s, which)

    async def run(self) -> None:
        """Renew the claims of live requests, at once and then from time to time, until cancelled.
        Those that Redis has lost are made again; ids that other shards have stay theirs."""
        await self._membership.read_again()
        self._is_map_current = True
        while True:
            is_renewed = await self._renew()
            await asyncio.sleep(_RENEWAL_S if is_renewed else _RETRY_S)

    async def _renew(self) -> bool:
        keys = list(self._live)
        if keys and self.is_needed:
            try:
                await self._directory.claim(keys, self.shard, self._ttl_s, Claim.NEW)
            except StoreError:
                return False
        return True
