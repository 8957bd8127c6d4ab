"""The token journal: what was sampled, step by step, before anybody hears of it."""

from collections.abc import Mapping
from dataclasses import dataclass

from scheduler_svc.store.packing import unpack_ids, unpack_parts, unpack_u32s
from scheduler_svc.store.types import TokenRuns


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """The tokens of one commit."""

    step: int
    runs: TokenRuns


def unpack_entry(entry_id: bytes, fields: Mapping[bytes, bytes]) -> JournalEntry:
    """An entry of a pool's stream, as commit wrote it."""
    runs = TokenRuns(
        list(unpack_ids(fields[b"sequences"])),
        list(unpack_u32s(fields[b"first_indices"])),
        list(unpack_u32s(fields[b"next_indices"])),
        list(unpack_u32s(fields[b"token_ids"])),
        unpack_parts(fields.get(b"logprobs", b"")),
    )
    return JournalEntry(int(entry_id.split(b"-")[0]), runs)
