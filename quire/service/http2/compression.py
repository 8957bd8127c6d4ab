"""Compressions of messages that clients may use."""

import asyncio
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from grpc import StatusCode

from quire.service.http2.messages import MessageRefused

# Their names in headers, and zlib's window sizes, which also choose the format.
_WINDOW_BITS: Final = {"gzip": 31, "deflate": 15}
# What a server accepts, as it says in its responses.
ACCEPTED: Final = ",".join(["identity", *_WINDOW_BITS])
# A message of this size has a thousand times as much at most, which takes milliseconds; larger ones
# are decompressed in a thread.
_SMALL_BYTES: Final = 1024
# Of all calls of a server: each result may have the size of the largest message, although it counts
# as unread with its compressed size.
_MAX_AT_ONCE: Final = 2
# Characters of a compression's name that a refusal repeats.
_MAX_NAME_CHARS: Final = 40


def is_known(name: str) -> bool:
    return name in _WINDOW_BITS


def refusal(error: MessageRefused, encoding: str) -> tuple[StatusCode, str]:
    """The status of a call that has named this compression and whose next message is refused."""
    code, why = error.code, f"SERVER: {error}"
    if code is StatusCode.UNIMPLEMENTED:
        why += f"; grpc-encoding is {encoding[:_MAX_NAME_CHARS]}, accepted: {ACCEPTED}"
        if encoding == "identity":
            code = StatusCode.INTERNAL
    return code, why


class Decompressor:
    """Decompresses messages of all calls of a server, a few at a time."""

    def __init__(self) -> None:
        # Held until the call goes on with the result.
        self._slots = asyncio.Semaphore(_MAX_AT_ONCE)
        # A message whose call has ended keeps its thread.
        self._threads = ThreadPoolExecutor(_MAX_AT_ONCE, "decompression")

    async def decompressed(self, message: bytes, name: str, max_bytes: int) -> bytes:
        """MessageRefused if the message cannot be read, or has more than `max_bytes`."""
        if len(message) <= _SMALL_BYTES:
            return _decompress(message, name, max_bytes)
        loop = asyncio.get_running_loop()
        async with self._slots:
            return await loop.run_in_executor(self._threads, _decompress, message, name, max_bytes)


def _decompress(message: bytes, name: str, max_bytes: int) -> bytes:
    decompressor = zlib.decompressobj(_WINDOW_BITS[name])
    try:
        found = decompressor.decompress(message, max_bytes + 1)
    except zlib.error as error:
        raise MessageRefused(StatusCode.INTERNAL, f"a message is no {name}: {error}") from error
    if len(found) > max_bytes:
        raise MessageRefused(
            StatusCode.RESOURCE_EXHAUSTED, f"a message has more than {max_bytes} bytes"
        )
    if not decompressor.eof or decompressor.unused_data:
        raise MessageRefused(StatusCode.INTERNAL, f"a message is no {name} with an end")
    return found
