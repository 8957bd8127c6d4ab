"""Request records: what a scheduler needs to go on with a request that it has accepted."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from scheduler_svc.store.packing import pack_u32s, unpack_u32s


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
    choice: int
    first_index: int
    token_ids: Sequence[int]


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
    output_token_ids: Mapping[int, tuple[int, ...]]  # by choice, as far as they are folded


def pack_record(record: RequestRecord) -> list[bytes | str | int]:
    """The fields of a record, in the order of record.lua."""
    return [
        record.key.principal,
        record.key.request_id,
        record.digest,
        pack_u32s(record.prompt_token_ids),
        record.params,
        record.sequence_id,
        "" if record.deadline_ms is None else record.deadline_ms,
        record.opaque,
    ]


def unpack_request(fields: Mapping[bytes, bytes], output: Mapping[bytes, bytes]) -> StoredRequest:
    """A record from its hash and its output."""
    deadline_ms = fields[b"deadline_ms"]
    record = RequestRecord(
        key=RequestKey(fields[b"principal"].decode(), fields[b"request_id"].decode()),
        digest=fields[b"digest"],
        prompt_token_ids=unpack_u32s(fields[b"prompt_token_ids"]),
        params=fields[b"params"],
        sequence_id=int(fields[b"sequence_id"]),
        deadline_ms=int(deadline_ms) if deadline_ms else None,
        opaque=fields[b"opaque"],
    )
    choices = {int(choice): unpack_u32s(tokens) for choice, tokens in sorted(output.items())}
    return StoredRequest(record, RequestState(fields[b"state"].decode()), choices)
