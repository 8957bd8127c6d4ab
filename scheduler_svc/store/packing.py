"""Commits, matches and replies as the packed arrays that the scripts read and write."""

import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import TypeVar

from scheduler_svc.store.types import Commit, CommitReply, PrefixMatch

T = TypeVar("T")


def pack_u32s(numbers: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}I", *numbers)


def unpack_u32s(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) // 4}I", packed)


def pack_ids(sequence_ids: Sequence[int]) -> bytes:
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
    runs, departures = commit.runs, commit.departures
    appends, admissions = commit.appends, commit.admissions
    return [
        pack_u32s(commit.withdrawals),
        pack_u32s([p.block_id for p in commit.publications]),
        b"".join(p.block_hash for p in commit.publications),
        pack_ids([run.sequence_id for run in runs]),
        pack_u32s([run.first_index for run in runs]),
        pack_u32s([run.first_index + len(run.token_ids) for run in runs]),
        pack_u32s(_flat(run.token_ids for run in runs)),
        pack_ids([departure.sequence_id for departure in departures]),
        pack_u32s([len(departure.block_ids) for departure in departures]),
        pack_u32s(_flat(departure.block_ids for departure in departures)),
        pack_ids([append.sequence_id for append in appends]),
        pack_u32s([append.num_blocks for append in appends]),
        pack_ids([admission.sequence_id for admission in admissions]),
        pack_u32s([admission.num_output_tokens for admission in admissions]),
        pack_u32s([len(admission.hit_hashes) for admission in admissions]),
        b"".join(_flat(admission.hit_hashes for admission in admissions)),
        pack_u32s([admission.num_new_blocks for admission in admissions]),
        pack_u32s([len(admission.fill_hashes) for admission in admissions]),
        b"".join(_flat(admission.fill_hashes for admission in admissions)),
    ]


def unpack_reply(commit: Commit, packed: bytes) -> CommitReply:
    """What a commit handed out, entry by entry."""
    numbers = iter(unpack_u32s(packed))
    return CommitReply(
        num_free_blocks=next(numbers),
        appended=tuple(_take(numbers, append.num_blocks) for append in commit.appends),
        admitted=tuple(_take(numbers, next(numbers)) or None for _ in commit.admissions),
    )


def _take(numbers: Iterator[int], count: int) -> tuple[int, ...]:
    return tuple(islice(numbers, count))


def _flat(parts: Iterable[Iterable[T]]) -> list[T]:
    return list(chain.from_iterable(parts))
