"""Computes log-probabilities of prompt tokens in slices: logits of a whole chunk of a prompt would
take more memory than the pass itself."""

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from kernels.dispatch import Implementation
from kernels.sampling import TokenLogprobs, token_logprobs
from worker_svc.model.served_model import BatchStates

# Of the float32 logits of a slice.
_SLICE_BYTES: Final = 64 * 2**20


def slices_of(num_tokens: int, vocab_size: int) -> Iterator[slice]:
    """The slices of so many tokens."""
    num_rows = max(1, _SLICE_BYTES // (4 * vocab_size))
    for start in range(0, num_tokens, num_rows):
        yield slice(start, start + num_rows)


def prompt_logprobs(
    final: BatchStates,
    logits_indices: Tensor,
    token_ids: Tensor,
    num_top: int,
    vocab_size: int,
    implementation: Implementation,
) -> TokenLogprobs:
    """Of `token_ids`, each in the place after the token `logits_indices` of the batch."""
    num_tokens = len(token_ids)
    most = min(num_top, vocab_size)
    # Allocated first: small tensors between the slices would keep the C library from using the
    # memory of one slice for the next.
    ids = token_ids.new_empty(num_tokens, 1 + most)
    ranks = torch.empty_like(ids)
    logprobs = torch.empty_like(ids, dtype=torch.float32)
    for part in slices_of(num_tokens, vocab_size):
        logits = final.logits(logits_indices[part])
        found = token_logprobs(logits, token_ids[part], most, implementation=implementation)
        ids[part], logprobs[part], ranks[part] = found.token_ids, found.logprobs, found.ranks
        del logits, found
    return TokenLogprobs(ids, logprobs, ranks)
