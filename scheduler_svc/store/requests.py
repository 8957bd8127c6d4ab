"""Request records: what a scheduler needs to go on with a request that it has accepted."""

from dataclasses import dataclass
from enum import StrEnum


class RequestState(StrEnum):
    LIVE = "live"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class RequestKey:
    """Request ids are scoped by the principal they belong to."""

    principal: str
    request_id: str


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A request as it was accepted."""

    key: RequestKey
    digest: bytes  # of the client's message before defaults
    prompt_token_ids: tuple[int, ...]
    params: bytes  # serialized ResolvedParams
    sequence_id: int
    deadline_ms: int | None = None  # Unix time
    opaque: bytes = b""  # the gateway's own


@dataclass(frozen=True, slots=True)
class OutputRun:
    """Output tokens to be folded into a record."""

    key: RequestKey
    first_index: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ending:
    """How a request ended."""

    key: RequestKey
    state: RequestState


@dataclass(frozen=True, slots=True)
class StoredRequest:
    """A record as Redis has it."""

    record: RequestRecord
    state: RequestState
    output_token_ids: tuple[int, ...]  # as far as they are folded
