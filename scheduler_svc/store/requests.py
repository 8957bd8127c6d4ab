"""Request records: all that a scheduler needs to continue an accepted request."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Final

from quire.service.tracing.context import TraceContext
from scheduler_svc.store.packing import pack_parts, pack_u32s, unpack_parts, unpack_u32s


class RequestState(StrEnum):
    LIVE = "live"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class RequestKey:
    """A request id, and the principal that owns it; empty without authentication."""

    principal: str
    request_id: str


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A request as it was accepted."""

    key: RequestKey
    digest: bytes  # of the client's message before defaults
    prompt_token_ids: Sequence[int]  # arrays of type `I` are fastest
    params: bytes  # serialized ResolvedParams
    sequence_id: int  # of choice 0; choice i has this + i
    deadline_ms: int | None = None  # Unix time
    opaque: bytes = b""  # the gateway's ResumeState, returned to it with an acceptance
    num_choices: int = 1
    priority: int = 0
    cache_salt: bytes = b""
    # How long the request runs on after its client has disconnected; None: it is cancelled.
    resume_window_s: int | None = None
    # Of the call that submitted it; None if that was not traced.
    trace_context: TraceContext | None = None

    @property
    def log_fields(self) -> dict[str, str]:
        """What identifies the request in a record of the log."""
        fields = {"request_id": self.key.request_id}
        if self.trace_context is not None:
            fields["trace_id"] = self.trace_context.trace_id_hex
        return fields


class RecordOutcome(IntEnum):
    """Outcome of writing a record; the values are record_requests.lua's."""

    NEW = 1  # written
    EXISTS = 2  # exists with the same digest, live or ended
    CONFLICT = 3  # its id is taken by another request


@dataclass(frozen=True, slots=True)
class OutputRange:
    """Output tokens to append to a record."""

    key: RequestKey
    choice: int
    first_index: int
    token_ids: Sequence[int]
    # Packed log-probabilities of the tokens, equally many bytes for each.
    logprobs: bytes = b""
    # The same of the prompt, with the first token of choice 0.
    prompt_logprobs: bytes = b""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a request ended."""

    key: RequestKey
    state: RequestState
    status: bytes = b""  # serialized google.rpc.Status; empty unless cancelled or failed
    num_cached_tokens: int = 0  # of the prompt


@dataclass(frozen=True, slots=True)
class StoredRequest:
    """A record as stored in Redis."""

    record: RequestRecord
    state: RequestState
    output_token_ids: Mapping[int, Sequence[int]]  # by choice, as far as compacted
    status: bytes = b""  # see Ending
    num_cached_tokens: int = 0
    # Packed, by choice, where there are any.
    output_logprobs: Mapping[int, bytes] = field(default_factory=dict)
    prompt_logprobs: bytes = b""  # packed


def pack_record(record: RequestRecord) -> bytes:
    """Pack a record without output, as in records.lua."""
    return pack_parts(_values(record))


def pack_live(request: StoredRequest) -> bytes:
    """Pack a record with its output, as in records.lua."""
    values = _values(request.record)
    for choice, token_ids in request.output_token_ids.items():
        values += (_digits(choice), pack_u32s(token_ids))
    for choice, logprobs in request.output_logprobs.items():
        values += (_digits(choice) + _LOGPROBS, logprobs)
    if request.prompt_logprobs:
        values += (_PROMPT_LOGPROBS, request.prompt_logprobs)
    return pack_parts(values)


def unpack_live(packed: bytes) -> StoredRequest:
    """Unpack a live record with its output."""
    values = unpack_parts(packed)
    fields, rest = values[: len(_FIELDS)], values[len(_FIELDS) :]
    output = dict(zip(rest[::2], rest[1::2], strict=True))
    return StoredRequest(
        _record(dict(zip(_FIELDS, fields, strict=True))),
        RequestState.LIVE,
        _output_token_ids(output),
        output_logprobs=_output_logprobs(output),
        prompt_logprobs=output.get(_PROMPT_LOGPROBS, b""),
    )


def unpack_request(fields: Mapping[bytes, bytes], output: Mapping[bytes, bytes]) -> StoredRequest:
    """Build a record from its two hashes in Redis."""
    return StoredRequest(
        _record(fields),
        RequestState(fields[b"state"].decode()),
        _output_token_ids(output),
        fields.get(b"status", b""),
        int(fields.get(b"num_cached_tokens", 0)),
        _output_logprobs(output),
        output.get(_PROMPT_LOGPROBS, b""),
    )


# In the order of records.lua.
_FIELDS: Final = (
    b"principal", b"request_id", b"digest", b"prompt_token_ids", b"params", b"sequence_id",
    b"deadline_ms", b"opaque", b"num_choices", b"priority", b"cache_salt", b"resume_window_s",
    b"trace_context",
)  # fmt: skip

# Suffix of a choice in the names of output fields.
_LOGPROBS: Final = b"/logprobs"
# The output field of the prompt's log-probabilities.
_PROMPT_LOGPROBS: Final = b"prompt_logprobs"


def _values(record: RequestRecord) -> list[bytes]:
    return [
        record.key.principal.encode(),
        record.key.request_id.encode(),
        record.digest,
        pack_u32s(record.prompt_token_ids),
        record.params,
        _digits(record.sequence_id),
        _digits(record.deadline_ms),
        record.opaque,
        _digits(record.num_choices),
        _digits(record.priority),
        record.cache_salt,
        _digits(record.resume_window_s),
        b"" if record.trace_context is None else record.trace_context.pack().encode(),
    ]


def _record(fields: Mapping[bytes, bytes]) -> RequestRecord:
    return RequestRecord(
        key=RequestKey(fields[b"principal"].decode(), fields[b"request_id"].decode()),
        digest=fields[b"digest"],
        prompt_token_ids=unpack_u32s(fields[b"prompt_token_ids"]),
        params=fields[b"params"],
        sequence_id=int(fields[b"sequence_id"]),
        deadline_ms=_number(fields[b"deadline_ms"]),
        opaque=fields[b"opaque"],
        num_choices=int(fields[b"num_choices"]),
        priority=int(fields[b"priority"]),
        cache_salt=fields[b"cache_salt"],
        resume_window_s=_number(fields[b"resume_window_s"]),
        # Records of an earlier version do not have it.
        trace_context=TraceContext.unpack(fields.get(b"trace_context", b"").decode()),
    )


def _output_token_ids(output: Mapping[bytes, bytes]) -> dict[int, tuple[int, ...]]:
    choices = sorted([int(name) for name in output if name.isdigit()])
    return {choice: unpack_u32s(output[_digits(choice)]) for choice in choices}


def _output_logprobs(output: Mapping[bytes, bytes]) -> dict[int, bytes]:
    return {
        int(name.removesuffix(_LOGPROBS)): logprobs
        for name, logprobs in output.items()
        if name.endswith(_LOGPROBS)
    }


def _digits(number: int | None) -> bytes:
    return b"" if number is None else b"%d" % number


def _number(digits: bytes) -> int | None:
    return int(digits) if digits else None
