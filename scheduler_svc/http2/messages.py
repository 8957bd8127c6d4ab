"""Messages of a gRPC stream, each after a prefix of five bytes."""

from struct import Struct
from typing import Final

from scheduler_svc.http2.frames import ProtocolError

# Whether it is compressed, and its length.
_PREFIX: Final = Struct(">?I")


def pack_message(message: bytes) -> bytes:
    return _PREFIX.pack(False, len(message)) + message


class MessageReader:
    """Divides the data of a stream into messages."""

    def __init__(self, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that these bytes complete. ProtocolError for one that is too large or
        compressed."""
        rest = self._rest
        if not rest and len(data) >= _PREFIX.size:
            # The common case: one whole message.
            is_compressed, length = _PREFIX.unpack_from(data)
            if length == len(data) - _PREFIX.size and not is_compressed:
                return [data[_PREFIX.size :]]
        rest += data
        messages = []
        start = 0
        while len(rest) - start >= _PREFIX.size:
            is_compressed, length = _PREFIX.unpack_from(rest, start)
            if is_compressed or length > self._max_message_bytes:
                raise ProtocolError(f"a message has {length} bytes, compressed: {is_compressed}")
            end = start + _PREFIX.size + length
            if end > len(rest):
                break
            messages.append(bytes(rest[start + _PREFIX.size : end]))
            start = end
        del rest[:start]
        return messages
