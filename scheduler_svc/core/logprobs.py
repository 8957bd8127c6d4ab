"""Log-probabilities of sampled tokens as packed bytes: stored, journaled and passed on unread.

A token's are as many entries as its request asked for, its own first. An entry is a token id (u32),
a log-probability (f32) and a rank (u32), little-endian.
"""

import struct
from itertools import accumulate, pairwise

from quire.internal.v1 import worker_pb2

# The chosen token and the top 20.
MAX_NUM_LOGPROBS = 21

_ENTRY = struct.Struct("<IfI")
ENTRY_BYTES = _ENTRY.size


def pack_logprobs(columns: worker_pb2.Logprobs) -> list[bytes]:
    """Per sampled token, empty for those that have none. ValueError where the columns do not fit
    each other."""
    entries = zip(columns.token_ids, columns.logprobs, columns.ranks, strict=True)
    packed = b"".join([_ENTRY.pack(*entry) for entry in entries])
    ends = accumulate(columns.num_entries, initial=0)
    pieces = [packed[start * ENTRY_BYTES : end * ENTRY_BYTES] for start, end in pairwise(ends)]
    if sum(columns.num_entries) * ENTRY_BYTES != len(packed):
        raise ValueError("the entries are not as many as their counts say")
    return pieces
