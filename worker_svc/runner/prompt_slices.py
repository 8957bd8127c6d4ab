"""Computes log-probabilities of prompt tokens in slices: logits of a whole chunk of a prompt would
take more memory than the pass itself."""

from typing import Final

import torch
from torch import Tensor

from kernels.dispatch import Implementation
from kernels.sampling import TokenLogprobs, token_logprobs
from worker_svc.model.split_forward import FinalStates

# Of the float32 logits of a slice.
_SLICE_BYTES: Final = 64 * 2**20


def prompt_logprobs(
    final: FinalStates,
    logits_indices: Tensor,
    token_ids: Tensor,
    num_top: int,
    vocab_size: int,
    implementation: Implementation | None,
) -> TokenLogprobs:
    """Of `token_ids`, each in the place after the token `logits_indices` of the batch."""
    num_rows = max(1, _SLICE_BYTES // (4 * vocab_size))
    slices = []
    for indices, targets in zip(
        torch.split(logits_indices, num_rows), torch.split(token_ids, num_rows), strict=True
    ):
        logits = final.logits(indices)
        most = min(num_top, logits.shape[1])
        slices.append(token_logprobs(logits, targets, most, implementation=implementation))
        del logits
    return TokenLogprobs(
        torch.cat([part.token_ids for part in slices]),
        torch.cat([part.logprobs for part in slices]),
        torch.cat([part.ranks for part in slices]),
    )
