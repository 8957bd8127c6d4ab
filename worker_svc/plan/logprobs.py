"""Log-probabilities of a step's sampled tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from quire.internal.v1 import worker_pb2
from worker_svc.plan.inputs import Ints

Floats = NDArray[np.float32]

# The chosen token and the most likely ones: 20 for a request's own, 32 as candidates of a search.
MAX_NUM_LOGPROBS = 33


@dataclass(frozen=True)
class Logprobs:
    """Entries of all sampled tokens, concatenated; per token its own, then the most likely ones."""

    num_entries: Ints  # per sampled token; 0 where none are requested
    token_ids: Ints
    logprobs: Floats
    ranks: Ints  # 1 is the most likely

    @classmethod
    def pack(cls, num_entries: Ints, token_ids: Ints, logprobs: Floats, ranks: Ints) -> Self:
        """`num_entries` has the requested number per sampled token. The other arrays have one line
        per token that requests any, which may be shorter than requested."""
        width = token_ids.shape[1]
        kept = np.arange(width) < num_entries[num_entries > 0, None]
        return cls(np.minimum(num_entries, width), token_ids[kept], logprobs[kept], ranks[kept])

    @classmethod
    def join(cls, counts: Sequence[int], parts: Sequence[Self | None]) -> Self | None:
        """Concatenate parts of `counts` sampled tokens each; a part is None if none of its tokens
        requests any. None if all are."""
        if all(part is None for part in parts):
            return None
        nothing = np.empty(0, np.int64), np.empty(0, np.float32)
        known = [
            part or cls(np.zeros(count, np.int64), nothing[0], nothing[1], nothing[0])
            for count, part in zip(counts, parts, strict=True)
        ]
        return cls(
            np.concatenate([part.num_entries for part in known]),
            np.concatenate([part.token_ids for part in known]),
            np.concatenate([part.logprobs for part in known]),
            np.concatenate([part.ranks for part in known]),
        )

    def part(self, start: int, end: int) -> Self:
        """The entries of the sampled tokens [start, end)."""
        first, last = int(self.num_entries[:start].sum()), int(self.num_entries[:end].sum())
        return type(self)(
            self.num_entries[start:end],
            self.token_ids[first:last],
            self.logprobs[first:last],
            self.ranks[first:last],
        )

    @classmethod
    def from_proto(cls, message: worker_pb2.Logprobs) -> Self:
        return cls(
            np.array(message.num_entries, np.int64),
            np.array(message.token_ids, np.int64),
            np.array(message.logprobs, np.float32),
            np.array(message.ranks, np.int64),
        )

    def to_proto(self) -> worker_pb2.Logprobs:
        return worker_pb2.Logprobs(
            num_entries=self.num_entries.tolist(),
            token_ids=self.token_ids.tolist(),
            logprobs=self.logprobs.tolist(),
            ranks=self.ranks.tolist(),
        )
