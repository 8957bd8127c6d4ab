"""Requests that one shard has given to another, in the inbox of the other."""

import secrets
from dataclasses import dataclass
from typing import Final, Self

from scheduler_svc.store.requests import StoredRequest, pack_live, unpack_live

_GIVEN, _CANCELLED = b"+", b"-"
# An entry begins with its kind and random bytes: a request that is given twice has two entries.
HEAD_BYTES: Final = 9


@dataclass(frozen=True, slots=True)
class Moved:
    """An entry: a request with its output so far, or that one given before was cancelled."""

    request: StoredRequest
    is_cancelled: bool = False

    @classmethod
    def parse(cls, packed: bytes) -> Self:
        """Read a packed entry."""
        return cls(unpack_live(packed[HEAD_BYTES:]), packed[:1] == _CANCELLED)

    def pack(self) -> bytes:
        """A new entry, for Redis."""
        kind = _CANCELLED if self.is_cancelled else _GIVEN
        return kind + secrets.token_bytes(HEAD_BYTES - 1) + pack_live(self.request)
