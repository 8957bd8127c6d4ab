"""Ends records as a leader does whose settings are the default ones."""

from collections.abc import Sequence

from scheduler_svc.store.requests import Ending
from scheduler_svc.store.store import Store


async def finish(
    store: Store,
    endings: Sequence[Ending],
    ttl_s: int = 600,
    finished_max_bytes: int = 256 << 20,
) -> None:
    await store.finish(endings, ttl_s, finished_max_bytes)
