"""Asks all shards for a request that is known by its id alone."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from quire.service.errors import RequestError

S = TypeVar("S")


async def first_found(shards: Sequence[S], ask: Callable[[S], Awaitable[bool]]) -> int | None:
    """The first shard that responds that it has the request; None if all respond that they have
    not. Shards that are added meanwhile are asked, too.

    RequestError if one did not respond and no other has it.
    """
    asked: dict[asyncio.Future[bool], int] = {}
    num_asked = 0
    failure: RequestError | None = None
    try:
        while True:
            for shard in range(num_asked, len(shards)):
                asked[asyncio.ensure_future(ask(shards[shard]))] = shard
            num_asked = len(shards)
            if not asked:
                break
            done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                shard = asked.pop(one)
                try:
                    if one.result():
                        return shard
                except RequestError as error:
                    failure = error
    finally:
        for one in asked:
            one.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    if failure is not None:
        raise failure
    return None
