"""What a connection begins with: the server's settings, or a response to another protocol."""

import re
from typing import Final

from quire.service.http2 import frames
from quire.service.http2.headers import MAX_HEADERS_BYTES
from quire.service.http2.limits import Limits
from quire.service.http2.server_call import INITIAL_WINDOW

# Of a frame, which counts among the unread bytes when it is complete.
MAX_FRAME_BYTES: Final = 2**16
_HTTP1: Final = re.compile(rb"[A-Z]{3,10} \S{1,4096} HTTP/1\.\d\r?\n")
_TEXT: Final = (
    b"This address serves gRPC over HTTP/2 alone. Quire's HTTP API has an address of its own, that "
    b"of the gateway's setting --http-listen. gRPC-Web and Connect are not served.\n"
)
# 400 and no other status: clients of HTTP APIs do not try it again.
_RESPONSE: Final = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(_TEXT), _TEXT)
)


def settings(limits: Limits) -> bytes:
    """The frames that the server sends first."""
    values = {
        frames.MAX_CONCURRENT_STREAMS: limits.max_calls,
        frames.INITIAL_WINDOW_SIZE: INITIAL_WINDOW,
        frames.MAX_FRAME_SIZE: MAX_FRAME_BYTES,
        frames.MAX_HEADER_LIST_SIZE: MAX_HEADERS_BYTES,
    }
    window = frames.pack_window_update(0, frames.MAX_WINDOW - frames.DEFAULT_WINDOW)
    return frames.pack_settings(values) + window


def response_to(data: bytes) -> bytes | None:
    """What a client reads that has sent this in place of HTTP/2; None if nothing is known that it
    would understand."""
    return _RESPONSE if _HTTP1.match(data) else None
