"""HTTP/2 frames (RFC 9113, section 4)."""

from struct import Struct
from typing import Final, NamedTuple

DATA: Final = 0
HEADERS: Final = 1
RST_STREAM: Final = 3
SETTINGS: Final = 4
PUSH_PROMISE: Final = 5
PING: Final = 6
GOAWAY: Final = 7
WINDOW_UPDATE: Final = 8
CONTINUATION: Final = 9

# Flags; some types share a bit.
ACK: Final = 0x1
END_STREAM: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
PRIORITY: Final = 0x20

# Identifiers of settings.
HEADER_TABLE_SIZE: Final = 1
ENABLE_PUSH: Final = 2
MAX_CONCURRENT_STREAMS: Final = 3
INITIAL_WINDOW_SIZE: Final = 4
MAX_FRAME_SIZE: Final = 5
MAX_HEADER_LIST_SIZE: Final = 6

# Codes of RST_STREAM and GOAWAY.
NO_ERROR: Final = 0
PROTOCOL_ERROR: Final = 1
REFUSED_STREAM: Final = 7
CANCEL: Final = 8
ENHANCE_YOUR_CALM: Final = 11

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
# Windows before any setting or update, and the largest ones.
DEFAULT_WINDOW: Final = 2**16 - 1
MAX_WINDOW: Final = 2**31 - 1
# As the last stream of a GOAWAY: of all that may come.
MAX_STREAM: Final = 2**31 - 1
DEFAULT_FRAME_SIZE: Final = 2**14

# Length (24 bits) and type, flags, stream.
HEADER: Final = Struct(">IBI")
_SETTING: Final = Struct(">HI")
U32: Final = Struct(">I")
_GOAWAY: Final = Struct(">II")
# The first bit of a stream's number and of a window's increment is reserved.
_31_BITS: Final = 2**31 - 1
_PRIORITY_BYTES: Final = 5


class ProtocolError(Exception):
    """The peer has broken the protocol; the message is the reason."""

    goaway_code = PROTOCOL_ERROR


class FloodError(ProtocolError):
    """The peer sends more than it should."""

    goaway_code = ENHANCE_YOUR_CALM


class Frame(NamedTuple):
    kind: int
    flags: int
    stream: int
    payload: bytes

    @property
    def content(self) -> bytes:
        """The payload without padding and priority. ProtocolError for too much padding."""
        payload, start, end = self.payload, 0, len(self.payload)
        if self.flags & PADDED:
            start, end = 1, end - (payload[0] if payload else 0)
        if self.kind == HEADERS and self.flags & PRIORITY:
            start += _PRIORITY_BYTES
        if start > end:
            raise ProtocolError("a frame has more padding than bytes")
        return payload[start:end] if start or end < len(payload) else payload

    @property
    def number(self) -> int:
        """The first 31 bits of the payload, of frames that have nothing else or begin with it."""
        if len(self.payload) < U32.size:
            raise ProtocolError("a frame is too short")
        return int(U32.unpack_from(self.payload)[0]) & _31_BITS

    @property
    def code(self) -> int:
        """The error code of a RST_STREAM frame."""
        if len(self.payload) != U32.size:
            raise ProtocolError("a frame is too short")
        return int(U32.unpack(self.payload)[0])


def pack_frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return HEADER.pack(len(payload) << 8 | kind, flags, stream) + payload


def pack_settings(settings: dict[int, int]) -> bytes:
    return pack_frame(SETTINGS, 0, 0, b"".join([_SETTING.pack(*pair) for pair in settings.items()]))


def pack_window_update(stream: int, increment: int) -> bytes:
    return pack_frame(WINDOW_UPDATE, 0, stream, U32.pack(increment))


def pack_reset(stream: int, code: int) -> bytes:
    return pack_frame(RST_STREAM, 0, stream, U32.pack(code))


def pack_goaway(last_stream: int, code: int) -> bytes:
    return pack_frame(GOAWAY, 0, 0, _GOAWAY.pack(last_stream, code))


def unpack_settings(frame: Frame) -> dict[int, int]:
    """ProtocolError for a payload of the wrong length."""
    if len(frame.payload) % _SETTING.size:
        raise ProtocolError("settings have a wrong length")
    return dict(_SETTING.iter_unpack(frame.payload))


class FrameReader:
    """Divides received bytes into frames."""

    def __init__(self, max_frame_bytes: int) -> None:
        self._max_frame_bytes = max_frame_bytes
        # What was received and is not read yet: from `_start` on, and behind it the pieces, which
        # are joined as soon as a frame is complete, so that many small ones cost no more copies.
        self._data = b""
        self._start = 0
        self._pieces: list[bytes] = []
        # Without them there is no further frame; not positive if there may be one.
        self._num_missing = 0
        # How often it has waited for the rest of a frame: the same number is the same frame.
        self.num_waits = 0

    @property
    def is_empty(self) -> bool:
        """Whether no frame has begun."""
        return not self._pieces and self._start == len(self._data)

    def add(self, data: bytes) -> None:
        """Add received bytes."""
        self._pieces.append(data)
        self._num_missing -= len(data)

    def take(self) -> Frame | None:
        """The next frame; None if it is not complete yet. ProtocolError if it is too large."""
        if self._num_missing > 0:
            return None
        if self._pieces:
            self._data = b"".join((self._data[self._start :], *self._pieces))
            self._start = 0
            self._pieces.clear()
        first = self._start + HEADER.size
        self._num_missing = first - len(self._data)
        if self._num_missing > 0:
            # An idle connection keeps nothing.
            self._data, self._start = self._data[self._start :], 0
            self.num_waits += 1
            return None
        word, flags, stream = HEADER.unpack_from(self._data, self._start)
        if word >> 8 > self._max_frame_bytes:
            raise ProtocolError(f"a frame has {word >> 8} bytes")
        behind = first + (word >> 8)
        self._num_missing = behind - len(self._data)
        if self._num_missing > 0:
            self.num_waits += 1
            return None
        self._start = behind
        return Frame(word & 0xFF, flags, stream & _31_BITS, self._data[first:behind])

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that these bytes complete. ProtocolError for one that is too large."""
        self.add(data)
        return list(iter(self.take, None))
