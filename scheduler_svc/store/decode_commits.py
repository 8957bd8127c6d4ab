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
from scheduler_svc.store.resp import pack_arguments
from scheduler_svc.store.types import CommitReply, Publication

# Arguments of commit.lua that these commits do not have, by their places.
_NO_WITHDRAWALS = pack_arguments((b"",))
_NO_LOGPROBS = pack_arguments((b"",) * 2)
_NO_RELEASES = pack_arguments((b"",) * 3)
_NO_ADMISSIONS = pack_arguments((b"",) * 9)
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
    ) -> None:
        """`first_indices`: of each sequence's output, the token that the first commit has."""
        self.keys = keys
        self._connection = connection
        script, names = scripts.COMMIT, keys.all
        num_parts = 3 + len(names) + _NUM_ARGUMENTS
        head = ("EVALSHA", script.digest, len(names), *names, leadership.epoch, leadership.holder)
        self._head = b"*%d\r\n" % num_parts + pack_arguments(head)
        self._ids = pack_arguments((pack_ids(sequence_ids),))
        self._firsts = pack_arguments((pack_u32s(first_indices),))

    def begin(
        self,
        step: int,
        publications: Sequence[Publication],
        next_indices: Sequence[int],
        token_ids: Sequence[int],
        num_taken: int,
        on_end: Callable[[CommitReply | None], None],
    ) -> bool:
        """Send a commit, as `Pool.commit` does. False if the connection is not open: nothing is
        sent. `on_end` gets the reply, or None: then the commit is to be repeated by `Pool.commit`,
        which handles or raises the error."""
        nexts = pack_arguments((pack_u32s(next_indices),))
        if publications:
            published = pack_arguments(
                (
                    pack_u32s([publication.block_id for publication in publications]),
                    b"".join([publication.block_hash for publication in publications]),
                )
            )
        else:
            published = pack_arguments((b"", b""))
        packed = b"".join(
            (
                self._head,
                pack_arguments((step,)),
                _NO_WITHDRAWALS,
                published,
                self._ids,
                self._firsts,
                nexts,
                pack_arguments((pack_u32s(token_ids),)),
                _NO_LOGPROBS,
                _NO_RELEASES,
                pack_arguments((pack_u32s([1] * num_taken),)),
                _NO_ADMISSIONS,
            )
        )
        # The next commit continues here.
        self._firsts = nexts

        def unpack(reply: Any) -> None:
            if isinstance(reply, bytes):
                num_free, *taken = unpack_u32s(reply)
                on_end(CommitReply(num_free, tuple(taken), ()))
            else:
                on_end(None)

        return self._connection.begin(packed, unpack)
