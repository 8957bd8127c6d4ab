"""Ends the calls of a connection that is lost."""

import asyncio
import time
from typing import Final

from quire.service.http2.server_call import ServerCall

# Calls are ended for so long at a time. Their handlers take longer to end than this does, and a
# client may have thousands.
_MAX_SLICE_S: Final = 0.001


def reset_calls(calls: dict[int, ServerCall]) -> None:
    """Reset all calls, each of which leaves the dictionary then; other clients are served in
    between."""
    ends_at = time.monotonic() + _MAX_SLICE_S
    while calls:
        next(iter(calls.values())).reset()
        if time.monotonic() >= ends_at:
            asyncio.get_running_loop().call_soon(reset_calls, calls)
            break
