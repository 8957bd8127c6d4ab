"""Cancellations and lookups by request id that await their results."""

import asyncio
from collections.abc import Callable, Iterator

from quire.internal.v1 import scheduler_pb2
from quire.service.errors import RequestError

Query = scheduler_pb2.Cancellation | scheduler_pb2.Lookup


class IdQueries:
    """The queries to one shard, by their tags. They outlive its leader: the next one receives them
    again."""

    def __init__(self) -> None:
        self._pending: dict[int, tuple[Query, asyncio.Future[bool]]] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def __iter__(self) -> Iterator[Query]:
        """All queries without a result, in order."""
        return iter([query for query, _ in self._pending.values()])

    async def ask(self, query: Query, send: Callable[[Query], object], wait_s: float) -> bool:
        """Send a query and return whether its request was found. TimeoutError after `wait_s`."""
        is_found: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._pending[query.tag] = query, is_found
        send(query)
        try:
            async with asyncio.timeout(wait_s):
                return await is_found
        finally:
            del self._pending[query.tag]

    def resolve(self, tag: int, is_found: bool) -> None:
        """Deliver a result; late ones have no effect."""
        if tag in self._pending and not self._pending[tag][1].done():
            self._pending[tag][1].set_result(is_found)

    def fail_all(self, error: RequestError) -> None:
        for _, is_found in self._pending.values():
            if not is_found.done():
                is_found.set_exception(error)
