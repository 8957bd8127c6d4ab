"""Commits, matches and replies as the packed arrays that the scripts read and write."""

import struct
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice

from scheduler_svc.store.types import Commit, CommitReply, PrefixMatch

# Arguments of commit behind the log-probabilities.
_NUM_CHANGES = 13


def mapping(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    """Names and values in turn, as Redis gives them."""
    return dict(zip(flat[::2], flat[1::2], strict=True))


def pack_u32s(numbers: Iterable[int]) -> bytes:
    """Little-endian, as the scripts read them. Arrays of the type `I` are quickest."""
    if not numbers:
        # Most of what a step could say it does not.
        return b""
    packed = numbers if isinstance(numbers, array) else array("I", numbers)
    if sys.byteorder == "big":
        packed = packed[:]
        packed.byteswap()
    return packed.tobytes()


def unpack_u32s(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) // 4}I", packed)


def pack_parts(parts: Iterable[bytes]) -> bytes:
    """Each part behind its length as little-endian u32."""
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
    """The ARGV of match."""
    return pack_u32s([len(query) for query in queries]), b"".join(chain.from_iterable(queries))


def unpack_matches(packed: bytes) -> list[PrefixMatch]:
    numbers = unpack_u32s(packed)
    return [
        PrefixMatch(num_hits, num_free)
        for num_hits, num_free in zip(numbers[::2], numbers[1::2], strict=True)
    ]


def pack_commit(commit: Commit) -> list[bytes]:
    """The ARGV of commit, from the withdrawals on."""
    publications, runs = commit.publications, commit.runs
    return [
        pack_u32s(commit.withdrawals),
        pack_u32s([publication.block_id for publication in publications]),
        b"".join([publication.block_hash for publication in publications]),
        pack_ids(runs.sequence_ids),
        pack_u32s(runs.first_indices),
        pack_u32s(runs.next_indices),
        pack_u32s(runs.token_ids),
        pack_parts(runs.logprobs),
        *_pack_changes(commit),
    ]


def _pack_changes(commit: Commit) -> list[bytes]:
    """What it says of blocks, and of sequences that come and go: in most steps nothing."""
    joined, admissions = commit.joined, commit.admissions
    if not (
        commit.forgotten
        or commit.shared_blocks
        or commit.returned_blocks
        or commit.taken_references
        or joined
        or admissions
    ):
        return [b""] * _NUM_CHANGES
    return [
        pack_ids(commit.forgotten),
        pack_u32s(commit.shared_blocks),
        pack_u32s(commit.returned_blocks),
        pack_u32s(commit.taken_references),
        pack_ids([entry.sequence_id for entry in joined]),
        pack_u32s([entry.num_output_tokens for entry in joined]),
        pack_ids([admission.sequence_id for admission in admissions]),
        pack_u32s([admission.num_output_tokens for admission in admissions]),
        pack_u32s([len(admission.hit_hashes) for admission in admissions]),
        b"".join(chain.from_iterable(admission.hit_hashes for admission in admissions)),
        pack_u32s([admission.num_new_blocks for admission in admissions]),
        pack_u32s([len(admission.fill_hashes) for admission in admissions]),
        b"".join(chain.from_iterable(admission.fill_hashes for admission in admissions)),
    ]


def unpack_reply(commit: Commit, packed: bytes) -> CommitReply:
    """What a commit handed out, entry by entry."""
    numbers = iter(unpack_u32s(packed))
    return CommitReply(
        num_free_blocks=next(numbers),
        taken=_take(numbers, len(commit.taken_references)),
        admitted=tuple([_take(numbers, next(numbers)) or None for _ in commit.admissions]),
    )


def _take(numbers: Iterator[int], count: int) -> tuple[int, ...]:
    return tuple(islice(numbers, count))
