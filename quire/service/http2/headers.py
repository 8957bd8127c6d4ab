"""Header blocks of HTTP/2, and what gRPC writes into them."""

import base64
import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple
from urllib.parse import quote, unquote_to_bytes

from grpc import StatusCode
from hpack import Decoder
from hpack.exceptions import HPACKError

from quire.service.http2 import frames
from quire.service.http2.frames import Frame, ProtocolError

# Of the headers of a call, counted as HTTP/2 does. Metadata of gRPC has 8 KiB at most by default.
MAX_HEADERS_BYTES: Final = 2**16
# Of a block as it is received, and as it is decoded, for which the connection is kept. It bounds
# the time of decoding: hpack copies the rest of a block for each literal field.
_MAX_BLOCK_BYTES: Final = 2**17
# At the start of a block, which needs two (RFC 7541, section 4.2). Each is a number with a prefix
# of five bits.
_TOO_MANY_RESIZES: Final = re.compile(rb"(?:[\x20-\x3e]|\x3f[\x80-\xff]*[\x00-\x7f]){5}")
# An indexed field is one byte, and takes a hundred in memory as long as the call.
_MAX_FIELDS: Final = 256
# What a field counts besides its bytes.
_FIELD_BYTES: Final = 32
# Of a status message as it is sent: beyond 8 KiB of metadata, gRPC's clients refuse some responses.
_MAX_MESSAGE_BYTES: Final = 4096
# Fields that gRPC itself writes.
_OF_THE_CALL: Final = frozenset(
    {
        b"te",  # codespell:ignore te
        b"content-type",
        b"grpc-timeout",
        b"grpc-encoding",
        b"grpc-accept-encoding",
        b"grpc-message-type",
    }
)
_TIMEOUT = re.compile(rb"(\d{1,8})([HMSmun])")
_UNITS_S: Final = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
# Characters of a status message that are not percent-encoded: printable ones without %.
_PLAIN: Final = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")


class Headers(NamedTuple):
    stream: int
    # Of a repeated name, the last one.
    fields: Mapping[bytes, bytes]
    # All of them.
    pairs: Sequence[tuple[bytes, bytes]]
    # Nothing follows in the stream.
    ends_stream: bool
    num_bytes: int

    @property
    def excess(self) -> str | None:
        """What is too much for a call; None if nothing is."""
        if self.num_bytes > MAX_HEADERS_BYTES:
            return f"the metadata has {self.num_bytes} bytes, more than {MAX_HEADERS_BYTES}"
        if len(self.pairs) > _MAX_FIELDS:
            return f"the metadata has {len(self.pairs)} fields, more than {_MAX_FIELDS}"
        return None


class HeaderBlocks:
    """Joins and decodes the header blocks of a connection, in their order."""

    def __init__(self) -> None:
        self._decoder = Decoder(max_header_list_size=_MAX_BLOCK_BYTES)
        # The first frame of a block, and what has been received of it.
        self._first: Frame | None = None
        self._block = bytearray()
        self.num_begun = 0

    @property
    def is_empty(self) -> bool:
        """Whether no block has begun."""
        return self._first is None

    def check_order(self, frame: Frame) -> None:
        """ProtocolError if another frame has to follow."""
        is_next = frame.kind == frames.CONTINUATION
        if self._first is None:
            if is_next:
                raise ProtocolError("a header block has no start")
        elif not is_next or frame.stream != self._first.stream:
            raise ProtocolError("a header block is incomplete")

    def feed(self, frame: Frame) -> Headers | None:
        """The headers that a frame completes. ProtocolError if they cannot be decoded."""
        if self._first is None:
            self._first = frame
            self.num_begun += 1
            self._block = bytearray(frame.content)
        else:
            self._block += frame.payload
        if len(self._block) > _MAX_BLOCK_BYTES:
            raise ProtocolError("headers: too large")
        if not frame.flags & frames.END_HEADERS:
            return None
        first, self._first = self._first, None
        # An idle connection keeps nothing.
        block, self._block = bytes(self._block), bytearray()
        if _TOO_MANY_RESIZES.match(block):
            raise ProtocolError("headers: too many changes of the table's size")
        try:
            decoded = self._decoder.decode(block, raw=True)
        except HPACKError as error:
            # Its text may repeat the whole block, with API keys in it.
            raise ProtocolError(f"headers: {type(error).__name__}") from error
        pairs = [(bytes(name), bytes(value)) for name, value in decoded]
        num_bytes = sum(len(name) + len(value) + _FIELD_BYTES for name, value in decoded)
        ends_stream = bool(first.flags & frames.END_STREAM)
        return Headers(first.stream, dict(pairs), pairs, ends_stream, num_bytes)


def pack_headers(stream: int, block: bytes, ends_stream: bool) -> bytes:
    """The frames of an encoded block."""
    size, flags = frames.DEFAULT_FRAME_SIZE, frames.END_STREAM if ends_stream else 0
    parts = [block[start : start + size] for start in range(0, len(block), size)]
    packed, kind = [], frames.HEADERS
    for number, part in enumerate(parts, 1):
        end = frames.END_HEADERS if number == len(parts) else 0
        packed.append(frames.pack_frame(kind, flags | end, stream, part))
        kind, flags = frames.CONTINUATION, 0
    return b"".join(packed)


def metadata_of(headers: Headers) -> tuple[tuple[str, str | bytes], ...]:
    """What the client has added to a call. What cannot be read is left out."""
    found: list[tuple[str, str | bytes]] = []
    for name, value in headers.pairs:
        if name.startswith(b":") or name in _OF_THE_CALL:
            continue
        if not name.endswith(b"-bin"):
            found.append((name.decode("ascii", "replace"), value.decode("ascii", "replace")))
            continue
        for part in value.split(b","):
            with contextlib.suppress(ValueError):
                found.append((name.decode("ascii", "replace"), decode_binary(part)))
    return tuple(found)


def decode_binary(value: bytes) -> bytes:
    """The value of a field whose name ends with `-bin`. ValueError if it cannot be read."""
    # Padding is optional.
    return base64.b64decode(value + b"==")


def status_fields(
    code: StatusCode, message: str, metadata: Iterable[tuple[str, str | bytes]] = ()
) -> list[tuple[str, str]]:
    """The fields of a call's status, with trailing metadata. A long message is cut."""
    fields = [("grpc-status", str(code.value[0]))]
    if message:
        fields.append(("grpc-message", _quoted(message)))
    for name, value in metadata:
        if isinstance(value, bytes):
            value = base64.b64encode(value).rstrip(b"=").decode()
        fields.append((name, value))
    return fields


def _quoted(message: str) -> str:
    quoted = quote(message, safe=_PLAIN, errors="replace")
    if len(quoted) <= _MAX_MESSAGE_BYTES:
        return quoted
    # Neither within an escape nor within a character of several.
    cut = re.sub("%.?$", "", quoted[:_MAX_MESSAGE_BYTES])
    return quote(unquote_to_bytes(cut).decode(errors="ignore"), safe=_PLAIN)


def timeout_s_of(fields: Mapping[bytes, bytes]) -> float | None:
    """The time until a call's deadline; None without one, or if it cannot be read."""
    match = _TIMEOUT.fullmatch(fields.get(b"grpc-timeout", b""))
    return None if match is None else int(match[1]) * _UNITS_S[match[2]]
