"""Log-probabilities of sampled tokens as packed bytes: stored, journaled and passed on unread.

Each token has as many entries as its request asks for, its own first. An entry is a token id (u32),
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
    """Pack entries per sampled token; empty for tokens without any. ValueError if the columns'
    lengths disagree."""
    entries = zip(columns.token_ids, columns.logprobs, columns.ranks, strict=True)
    packed = b"".join([_ENTRY.pack(*entry) for entry in entries])
    ends = accumulate(columns.num_entries, initial=0)
    pieces = [packed[start * ENTRY_BYTES : end * ENTRY_BYTES] for start, end in pairwise(ends)]
    if sum(columns.num_entries) * ENTRY_BYTES != len(packed):
        raise ValueError("the number of entries does not match their counts")
    return pieces
