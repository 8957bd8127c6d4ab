"""Commits of consecutive steps that only decode the same sequences.

Most of such a commit is the same each time, so it is packed once. Its reply is handed to a
callback, because an await through all layers of a call costs more than the call.
"""

from collections.abc import Callable, Sequence
from typing import Any

from scheduler_svc.store import scripts
from scheduler_svc.store.connection import Connection
from scheduler_svc.store.keys import PoolKeys
from scheduler_svc.store.leadership import Leadership
from scheduler_svc.store.packing import pack_ids, pack_u32s, unpack_u32s
from scheduler_svc.store.resp import pack_argument, pack_arguments
from scheduler_svc.store.types import CommitReply, Publication

# Empty arguments of commit.lua: log-probabilities, and changes of other sequences than these.
_NONE = pack_argument(b"")
_NO_LOGPROBS_OR_RELEASES = _NONE * 5
_NO_ADMISSIONS = _NONE * 9
_NUM_ARGUMENTS = 25


class DecodeCommits:
    """Commits for one set of sequences, in which each one gains one token."""

    def __init__(
        self,
        connection: Connection,
        leadership: Leadership,
        keys: PoolKeys,
        sequence_ids: Sequence[int],
        first_indices: Sequence[int],
        on_end: Callable[[CommitReply | None], None],
    ) -> None:
        """`first_indices`: of each sequence's output, the token that the first commit has. `on_end`
        gets the reply of each commit, or None: then it is to be repeated by `Pool.commit`, which
        handles or raises the error."""
        self._on_end = on_end
        self.keys = keys
        self._connection = connection
        script, names = scripts.COMMIT, keys.all
        num_parts = 3 + len(names) + _NUM_ARGUMENTS
        head = ("EVALSHA", script.digest, len(names), *names, leadership.epoch, leadership.holder)
        self._head = b"*%d\r\n" % num_parts + pack_arguments(head)
        self._ids = pack_argument(pack_ids(sequence_ids))
        self._firsts = pack_argument(pack_u32s(first_indices))

    def begin(
        self,
        step: int,
        publications: Sequence[Publication],
        next_indices: Sequence[int],
        token_ids: Sequence[int],
        num_taken: int,
    ) -> bool:
        """Send a commit, as `Pool.commit` does. False if the connection is not open: nothing is
        sent."""
        nexts = pack_argument(pack_u32s(next_indices))
        taken = pack_argument(pack_u32s([1] * num_taken)) if num_taken else _NONE
        packed = b"".join(
            (
                self._head,
                pack_argument(b"%d" % step),
                _NONE,  # withdrawals
                _pack_publications(publications) if publications else _NONE * 2,
                self._ids,
                self._firsts,
                nexts,
                pack_argument(pack_u32s(token_ids)),
                _NO_LOGPROBS_OR_RELEASES,
                taken,
                _NO_ADMISSIONS,
            )
        )
        # The next commit continues here.
        self._firsts = nexts
        return self._connection.begin(packed, self._ended)

    def _ended(self, replies: list[Any] | Exception) -> None:
        if isinstance(replies, list) and isinstance(packed := replies[0], bytes):
            num_free, *taken = unpack_u32s(packed)
            self._on_end(CommitReply(num_free, tuple(taken), ()))
        else:
            self._on_end(None)


def _pack_publications(publications: Sequence[Publication]) -> bytes:
    return pack_arguments(
        (
            pack_u32s([publication.block_id for publication in publications]),
            b"".join([publication.block_hash for publication in publications]),
        )
    )
