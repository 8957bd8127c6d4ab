"""Sampling in Triton, without sorting a row or waiting for the host.

Six launches, most of which divide each row into splits or tiles:

1. `peaks_kernel`: the largest logit of each split
2. `argmax_kernel`: the argmax of scaled logit plus Gumbel noise, regardless of top_k and top_p
3. `collect_kernel`: in rows with a filter, the candidates: logits near the row's largest one
4. `filter_kernel`: whether top_k and top_p keep the argmax, which then is the token. If not, the
   floor, the smallest logit that they keep, is searched among the candidates, or in the whole row
   if those are too many or too few.
5. `argmax_kernel` again, above the floor, in rows whose argmax was dropped
6. `merge_splits_kernel`: a row's token from its splits

Splits contribute maxima, which do not depend on the order. Sums are divided and ordered by the size
of the vocabulary only. So a row's token depends neither on other rows nor on the number of splits.
"""

from typing import Final

import torch
import triton
from torch import Tensor

from kernels.gpu.gumbel_argmax import MAX_SPLITS, argmax_kernel, merge_splits_kernel, peaks_kernel
from kernels.gpu.sampling_filter import collect_kernel, filter_kernel
from kernels.inputs.sampling_tensors import SamplingTensors

_BLOCK: Final = 1024  # logits that a program processes at a time
_FILTER_BLOCK: Final = 2048  # the same of `filter_kernel`, with a row per program
_PIVOTS: Final = 8  # bounds that it tries in one pass
# About four programs per multiprocessor of a large GPU.
_WANTED_PROGRAMS: Final = 512
_TILE: Final = 4096  # logits per program of `collect_kernel`
# The most candidates of a tile, and how far below the largest logit they may be, in temperatures:
# candidates are at least e^-10 times as likely.
_CAPACITY: Final = 128
_CANDIDATE_RANGE: Final = 10.0


def num_splits(num_rows: int, vocab_size: int) -> int:
    """The number of splits of each row: many if there are few rows, none of them empty."""
    blocks = triton.cdiv(vocab_size, _BLOCK)
    wanted = min(MAX_SPLITS.value, blocks, triton.cdiv(_WANTED_PROGRAMS, max(1, num_rows)))
    return int(triton.cdiv(blocks, triton.cdiv(blocks, wanted)))


def sample_triton(logits: Tensor, params: SamplingTensors) -> Tensor:
    """`kernels.sampling.sample` in Triton; logits of 16 bits are converted to float32.

    Does not wait for the device, so it can be captured into a graph.
    """
    num_rows, vocab_size = logits.shape
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if not num_rows:
        return token_ids
    splits = num_splits(num_rows, vocab_size)
    split_size = triton.cdiv(triton.cdiv(vocab_size, _BLOCK), splits) * _BLOCK
    peaks, scores = (logits.new_empty(num_rows, splits, dtype=torch.float32) for _ in range(2))
    peak_ids, argmax_ids = (torch.empty_like(peaks, dtype=torch.int32) for _ in range(2))
    floors = torch.empty_like(params.temperatures)
    row = (logits, logits.stride(0), vocab_size)
    noise = (params.temperatures, params.min_ps, params.seeds, params.positions)
    argmax = (*row, split_size, *noise, floors, peaks, scores, argmax_ids)
    peaks_kernel[(num_rows, splits)](*row, split_size, peaks, peak_ids, BLOCK=_BLOCK)
    argmax_kernel[(num_rows, splits)](*argmax, FILTERED=False, BLOCK=_BLOCK)
    _find_floors(logits, params, splits, peaks, scores, argmax_ids, floors)
    argmax_kernel[(num_rows, splits)](*argmax, FILTERED=True, BLOCK=_BLOCK)
    merge_splits_kernel[(num_rows,)](
        splits, params.temperatures, peaks, peak_ids, scores, argmax_ids, token_ids, num_warps=1
    )
    return token_ids


def _find_floors(
    logits: Tensor,
    params: SamplingTensors,
    splits: int,
    peaks: Tensor,
    scores: Tensor,
    argmax_ids: Tensor,
    floors: Tensor,
) -> None:
    """Launch steps 3 and 4: the rows' `floors`, from their peaks and argmaxes."""
    num_rows, vocab_size = logits.shape
    row = (logits, logits.stride(0), vocab_size)
    tiles = triton.cdiv(vocab_size, _TILE)
    candidates = logits.new_empty(num_rows, tiles * _CAPACITY)
    counts = peaks.new_empty(num_rows, tiles, dtype=torch.int32)
    masses, candidate_masses = (peaks.new_empty(num_rows, tiles) for _ in range(2))
    collected = (candidates, counts, masses, candidate_masses)
    filters = (params.temperatures, params.top_ks, params.top_ps)
    collect_kernel[(num_rows, tiles)](
        *row,
        splits,
        *filters,
        peaks,
        *collected,
        TILE=_TILE,
        CAPACITY=_CAPACITY,
        CANDIDATE_RANGE=_CANDIDATE_RANGE,
        num_warps=8,
    )
    filter_kernel[(num_rows,)](
        *row,
        splits,
        tiles,
        *filters,
        params.min_ps,
        peaks,
        scores,
        argmax_ids,
        *collected,
        floors,
        TILES=triton.next_power_of_2(tiles),
        CAPACITY=_CAPACITY,
        BLOCK=_FILTER_BLOCK,
        PIVOTS=_PIVOTS,
        num_warps=16,
    )
