"""Draft tokens by prompt lookup: what followed the last tokens where they occurred before.

Prompt lookup decoding (Saxena, 2023), vLLM's and transformers' `ngram` speculation.
"""

from typing import Final

import torch
from torch import Tensor

from kernels.dispatch import Implementation, choose

# Tokens at the end of a sequence that have to occur before.
SHORTEST: Final = 2
LONGEST: Final = 4


def prompt_lookup(
    token_table: Tensor,
    rows: Tensor,
    num_tokens: Tensor,
    most: Tensor,
    *,
    implementation: Implementation | None = None,
) -> Tensor:
    """Write draft tokens behind the tokens of rows; return the number of each row, int64.

    `token_table` is int32 `[num_rows, max_len]`, on the host, contiguous. Row `rows[i]` has
    `num_tokens[i]` tokens and room for `most[i]` more; all are int64. The sequence's last tokens,
    as many of them as possible, are sought earlier in it: LONGEST at most, SHORTEST at least, and
    of several occurrences the latest one. A row gets `most[i]` drafts, which are the tokens behind
    the occurrence, or none. If these reach the end of the sequence, they go on with the drafts.
    """
    counts = torch.empty_like(rows)
    if implementation is None:
        implementation = choose(token_table.device.type, ())
    if implementation.is_cpp:
        torch.ops.quire.prompt_lookup(
            token_table, rows, num_tokens, most, SHORTEST, LONGEST, counts
        )
    else:
        prompt_lookup_reference(token_table, rows, num_tokens, most, counts)
    return counts


def prompt_lookup_reference(
    token_table: Tensor, rows: Tensor, num_tokens: Tensor, most: Tensor, counts: Tensor
) -> None:
    """The reference of `prompt_lookup`."""
    each = zip(rows.tolist(), num_tokens.tolist(), most.tolist(), strict=True)
    for index, (row, length, count) in enumerate(each):
        tokens: list[int] = token_table[row, :length].tolist()
        first = _after_match(tokens)
        counts[index] = 0 if first is None else count
        if first is not None:
            for at in range(count):
                token_table[row, length + at] = token_table[row, first + at]


def _after_match(tokens: list[int]) -> int | None:
    """The index behind the latest of the longest matches of the end."""
    num_tokens = len(tokens)
    for length in range(LONGEST, SHORTEST - 1, -1):
        for first in range(num_tokens - length - 1, -1, -1):
            if tokens[first : first + length] == tokens[num_tokens - length :]:
                return first + length
    return None
