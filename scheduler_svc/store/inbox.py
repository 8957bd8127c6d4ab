"""Requests that one shard has given to another, in the inbox of the other."""

from dataclasses import dataclass
from typing import Self

from scheduler_svc.store.requests import RequestRecord, RequestState, StoredRequest
from scheduler_svc.store.requests import pack_live as pack_request
from scheduler_svc.store.requests import unpack_live as unpack_request

_GIVEN, _CANCELLED = b"+", b"-"


@dataclass(frozen=True, slots=True)
class Moved:
    """An entry: a request, or that one given before was cancelled."""

    record: RequestRecord
    is_cancelled: bool = False

    @classmethod
    def parse(cls, packed: bytes) -> Self:
        """Read a packed entry."""
        return cls(unpack_request(packed[1:]).record, packed[:1] == _CANCELLED)

    def pack(self) -> bytes:
        """For Redis."""
        request = StoredRequest(self.record, RequestState.LIVE, output_token_ids={})
        return (_CANCELLED if self.is_cancelled else _GIVEN) + pack_request(request)
