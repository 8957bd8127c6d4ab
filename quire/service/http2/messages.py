"""Messages of a gRPC stream, each after a prefix of five bytes."""

from struct import Struct
from typing import Final

from grpc import StatusCode

from quire.service.http2.frames import ProtocolError

# Whether it is compressed, and its length.
PREFIX: Final = Struct(">?I")


class MessageRefused(ProtocolError):
    """A message cannot be read: a code, and the reason."""

    def __init__(self, code: StatusCode, why: str) -> None:
        super().__init__(why)
        self.code = code


def pack_message(message: bytes) -> bytes:
    return PREFIX.pack(False, len(message)) + message


class MessageReader:
    """Divides the data of a stream into messages."""

    def __init__(self, max_message_bytes: int) -> None:
        self.max_message_bytes = max_message_bytes
        # Whether the next message may be compressed.
        self.allows_compressed = False
        self._rest = bytearray()

    def is_whole(self, data: bytes, start: int, end: int) -> bool:
        """Whether these bytes are the next message, as a whole and with nothing else."""
        if self._rest or end - start < PREFIX.size:
            return False
        is_compressed, length = PREFIX.unpack_from(data, start)
        return bool(length == end - start - PREFIX.size <= self.max_message_bytes) and not (
            is_compressed
        )

    @property
    def is_empty(self) -> bool:
        """Whether no message has begun."""
        return not self._rest

    @property
    def num_bytes(self) -> int:
        """What was received and is not read yet."""
        return len(self._rest)

    @property
    def is_next_compressed(self) -> bool:
        """Whether the next message, which has begun, is compressed."""
        return bool(self._rest[0])

    def add(self, data: bytes) -> None:
        """Add received bytes."""
        self._rest += data

    def has_next(self) -> bool:
        """Whether the next message is complete. MessageRefused if it is too large or
        compressed."""
        if len(self._rest) < PREFIX.size:
            return False
        is_compressed, length = PREFIX.unpack_from(self._rest)
        if is_compressed and not self.allows_compressed:
            raise MessageRefused(StatusCode.UNIMPLEMENTED, "a message is compressed")
        if length > self.max_message_bytes:
            raise MessageRefused(
                StatusCode.RESOURCE_EXHAUSTED,
                # As gRPC has it: clients recognise this text.
                f"Received message larger than max ({length} vs. {self.max_message_bytes})",
            )
        return bool(len(self._rest) >= PREFIX.size + length)

    def take(self) -> bytes | None:
        """The next message; None if it is not complete yet. MessageRefused as by `has_next`."""
        if not self.has_next():
            return None
        end = PREFIX.size + PREFIX.unpack_from(self._rest)[1]
        message = bytes(memoryview(self._rest)[PREFIX.size : end])
        del self._rest[:end]
        return message

    def clear(self) -> None:
        """Drop what was received."""
        self._rest.clear()

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that these bytes complete. MessageRefused as by `has_next`."""
        self.add(data)
        return list(iter(self.take, None))
