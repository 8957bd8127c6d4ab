"""Requests that one shard has given to another, in the inbox of the other."""

from dataclasses import dataclass
from typing import Self

from scheduler_svc.store.requests import StoredRequest, pack_live, unpack_live

_GIVEN, _CANCELLED = b"+", b"-"


@dataclass(frozen=True, slots=True)
class Moved:
    """An entry: a request with its output so far, or that one given before was cancelled."""

    request: StoredRequest
    is_cancelled: bool = False

    @classmethod
    def parse(cls, packed: bytes) -> Self:
        """Read a packed entry."""
        return cls(unpack_live(packed[1:]), packed[:1] == _CANCELLED)

    def pack(self) -> bytes:
        """For Redis."""
        return (_CANCELLED if self.is_cancelled else _GIVEN) + pack_live(self.request)
