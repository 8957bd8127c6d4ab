"""Checks large requests in a thread, so that other calls do not wait for them."""

import asyncio
from collections.abc import Callable

from google.protobuf.message import Message

_INLINE_BYTES = 2**15


async def checked(message: Message, check: Callable[[], None]) -> None:
    """Call `check`, which checks `message`. Megabytes of short values, such as calls of tools, take
    seconds."""
    if message.ByteSize() <= _INLINE_BYTES:
        check()
    else:
        await asyncio.to_thread(check)
