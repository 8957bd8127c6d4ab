"""The token journal: what was sampled, step by step, before anybody hears of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

from scheduler_svc.store.packing import unpack_ids, unpack_u32s
from scheduler_svc.store.types import TokenRun


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """The tokens of one commit."""

    step: int
    runs: tuple[TokenRun, ...]


def unpack_entry(entry_id: bytes, fields: Mapping[bytes, bytes]) -> JournalEntry:
    """An entry of a pool's stream, as commit wrote it."""
    tokens = iter(unpack_u32s(fields[b"token_ids"]))
    runs = [
        TokenRun(sequence_id, first, tuple(islice(tokens, following - first)))
        for sequence_id, first, following in zip(
            unpack_ids(fields[b"sequences"]),
            unpack_u32s(fields[b"first_indices"]),
            unpack_u32s(fields[b"next_indices"]),
            strict=True,
        )
    ]
    return JournalEntry(int(entry_id.split(b"-")[0]), tuple(runs))
