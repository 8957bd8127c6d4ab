"""Log-probabilities of prompt tokens: which ones a step computes, and their values."""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from quire.internal.v1 import worker_pb2
from worker_svc.plan.inputs import Ints
from worker_svc.plan.logprobs import Floats

# The packed entry of the internal protocol.
_ENTRY = np.dtype([("token_id", "<u4"), ("logprob", "<f4"), ("rank", "<u4")])


@dataclass(frozen=True)
class PromptTargets:
    """The prompt tokens whose log-probabilities a step computes: one range per row."""

    rows: Ints
    first_indices: Ints  # of each range's first token within its sequence
    num_tokens: Ints  # per range
    num_entries: Ints  # per token of each range
    # Per token, in the order of the ranges.
    logits_indices: Ints  # the token before it, in the flat batch
    token_ids: Ints

    @property
    def num_top(self) -> int:
        """Most likely tokens that some range wants."""
        return int(self.num_entries.max()) - 1


@dataclass(frozen=True)
class PromptLogprobs:
    """Packed log-probabilities of ranges of prompts."""

    rows: list[int]
    first_indices: list[int]
    num_tokens: list[int]
    num_entries: list[int]
    packed: bytes
    # Rows with a log-probability that is not a number.
    failing_rows: list[int]

    @classmethod
    def pack(cls, targets: PromptTargets, token_ids: Ints, logprobs: Floats, ranks: Ints) -> Self:
        """The arrays have one line per token, its own entry first, at least as wide as wanted, or
        as the vocabulary."""
        entries = np.empty(token_ids.shape, _ENTRY)
        entries["token_id"], entries["logprob"], entries["rank"] = token_ids, logprobs, ranks
        num_entries = np.minimum(targets.num_entries, token_ids.shape[1])
        ranges = np.split(entries, targets.num_tokens.cumsum()[:-1])
        return cls(
            targets.rows.tolist(),
            targets.first_indices.tolist(),
            targets.num_tokens.tolist(),
            num_entries.tolist(),
            b"".join(
                part[:, :width].tobytes() for part, width in zip(ranges, num_entries, strict=True)
            ),
            _failing_rows(targets, logprobs),
        )

    @classmethod
    def from_proto(cls, message: worker_pb2.PromptLogprobRanges) -> Self:
        return cls(
            list(message.rows),
            list(message.first_indices),
            list(message.num_tokens),
            list(message.num_entries),
            message.logprobs,
            [],
        )

    def to_proto(self) -> worker_pb2.PromptLogprobRanges:
        return worker_pb2.PromptLogprobRanges(
            rows=self.rows,
            first_indices=self.first_indices,
            num_tokens=self.num_tokens,
            num_entries=self.num_entries,
            logprobs=self.packed,
        )


def _failing_rows(targets: PromptTargets, logprobs: Floats) -> list[int]:
    is_wrong: NDArray[np.bool_] = np.isnan(logprobs.sum(axis=1))
    rows: Ints = np.repeat(targets.rows, targets.num_tokens)[is_wrong]
    return sorted(set(rows.tolist()))


def prompt_targets(
    rows: Ints,
    num_entries: Ints,
    num_prompt_tokens: Ints,
    query_start_loc: Ints,
    seq_lens: Ints,
    token_table: NDArray[np.int32],
) -> PromptTargets | None:
    """The targets of the scheduled `rows`; the next arrays have an entry for each of them. None if
    there are none.

    A row computes the tokens up to `seq_lens`; each gives the log-probability of the token after
    it, up to the last one of the prompt.
    """
    wanting = num_entries.nonzero()[0]
    if not len(wanting):
        return None
    starts = query_start_loc[wanting]
    firsts = seq_lens[wanting] - (query_start_loc[wanting + 1] - starts) + 1
    counts = np.minimum(seq_lens[wanting] + 1, num_prompt_tokens[wanting]) - firsts
    kept = counts > 0
    if not kept.any():
        return None
    wanting, starts, firsts, counts = wanting[kept], starts[kept], firsts[kept], counts[kept]
    within = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    indices = np.repeat(firsts, counts) + within
    return PromptTargets(
        rows=rows[wanting],
        first_indices=firsts,
        num_tokens=counts,
        num_entries=num_entries[wanting],
        logits_indices=np.repeat(starts, counts) + within,
        token_ids=token_table[np.repeat(rows[wanting], counts), indices].astype(np.int64),
    )
