"""Packs and unpacks the arrays that scripts read and write: commits, matches, replies, journals."""

import struct
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice

from scheduler_svc.store.types import Commit, CommitReply, JournalEntry, PrefixMatch, TokenRanges

# Number of the commit's arguments after the log-probabilities.
_NUM_CHANGES = 13


def mapping(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    """Convert a flat reply of alternating names and values."""
    return dict(zip(flat[::2], flat[1::2], strict=True))


def pack_u32s(numbers: Iterable[int]) -> bytes:
    """Pack as little-endian u32. Arrays of type `I` are fastest."""
    if not numbers:
        # The most common case: most arrays of a step are empty.
        return b""
    packed = numbers if isinstance(numbers, array) else array("I", numbers)
    if sys.byteorder == "big":
        packed = packed[:]
        packed.byteswap()
    return packed.tobytes()


def unpack_u32s(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) // 4}I", packed)


def pack_parts(parts: Iterable[bytes]) -> bytes:
    """Pack each part after its length as little-endian u32."""
    return b"".join([piece for part in parts for piece in (struct.pack("<I", len(part)), part)])


def unpack_parts(packed: bytes) -> list[bytes]:
    parts, start = [], 0
    while start < len(packed):
        end = start + 4 + int.from_bytes(packed[start : start + 4], "little")
        parts.append(packed[start + 4 : end])
        start = end
    return parts


def pack_ids(sequence_ids: Sequence[int]) -> bytes:
    if not sequence_ids:
        return b""
    return struct.pack(f"<{len(sequence_ids)}Q", *sequence_ids)


def unpack_ids(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) // 8}Q", packed)


def pack_queries(queries: Sequence[Sequence[bytes]]) -> tuple[bytes, bytes]:
    """The ARGV of match_prefixes."""
    return pack_u32s([len(query) for query in queries]), b"".join(chain.from_iterable(queries))


def unpack_matches(packed: bytes) -> list[PrefixMatch]:
    numbers = unpack_u32s(packed)
    return [
        PrefixMatch(num_hits, num_free)
        for num_hits, num_free in zip(numbers[::2], numbers[1::2], strict=True)
    ]


def pack_commit(commit: Commit) -> list[bytes]:
    """The ARGV of commit, from the withdrawals on."""
    publications, ranges = commit.publications, commit.token_ranges
    return [
        pack_u32s(commit.withdrawals),
        pack_u32s([publication.block_id for publication in publications]),
        b"".join([publication.block_hash for publication in publications]),
        pack_ids(ranges.sequence_ids),
        pack_u32s(ranges.first_indices),
        pack_u32s(ranges.next_indices),
        pack_u32s(ranges.token_ids),
        pack_parts(ranges.logprobs),
        pack_parts(ranges.prompt_logprobs),
        *_pack_changes(commit),
    ]


def _pack_changes(commit: Commit) -> list[bytes]:
    """The arguments for blocks and for added or removed sequences; all empty in most steps."""
    added, admissions = commit.added, commit.admissions
    if not (
        commit.removed
        or commit.shared_blocks
        or commit.returned_blocks
        or commit.taken_references
        or added
        or admissions
    ):
        return [b""] * _NUM_CHANGES
    return [
        pack_ids(commit.removed),
        pack_u32s(commit.shared_blocks),
        pack_u32s(commit.returned_blocks),
        pack_u32s(commit.taken_references),
        pack_ids([entry.sequence_id for entry in added]),
        pack_u32s([entry.num_output_tokens for entry in added]),
        pack_ids([admission.sequence_id for admission in admissions]),
        pack_u32s([admission.num_output_tokens for admission in admissions]),
        pack_u32s([len(admission.hit_hashes) for admission in admissions]),
        b"".join(chain.from_iterable(admission.hit_hashes for admission in admissions)),
        pack_u32s([admission.num_new_blocks for admission in admissions]),
        pack_u32s([len(admission.fill_hashes) for admission in admissions]),
        b"".join(chain.from_iterable(admission.fill_hashes for admission in admissions)),
    ]


def unpack_reply(commit: Commit, packed: bytes) -> CommitReply:
    """Unpack the blocks that a commit allocated, entry by entry."""
    numbers = iter(unpack_u32s(packed))
    return CommitReply(
        num_free_blocks=next(numbers),
        taken=_take(numbers, len(commit.taken_references)),
        admitted=tuple([_take(numbers, next(numbers)) or None for _ in commit.admissions]),
    )


def _take(numbers: Iterator[int], count: int) -> tuple[int, ...]:
    return tuple(islice(numbers, count))


def unpack_journal_entry(entry_id: bytes, fields: Mapping[bytes, bytes]) -> JournalEntry:
    """An entry of a pool's journal stream, as commit wrote it."""
    ranges = TokenRanges(
        list(unpack_ids(fields[b"sequences"])),
        list(unpack_u32s(fields[b"first_indices"])),
        list(unpack_u32s(fields[b"next_indices"])),
        list(unpack_u32s(fields[b"token_ids"])),
        unpack_parts(fields.get(b"logprobs", b"")),
        unpack_parts(fields.get(b"prompt_logprobs", b"")),
    )
    return JournalEntry(int(entry_id.split(b"-")[0]), ranges)
