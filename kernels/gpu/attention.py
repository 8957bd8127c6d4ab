"""`paged_attention` in Triton: chooses and launches the kernels for a batch.

Launches depend only on values on the host, so nothing waits for the device, and a captured graph is
valid for every batch within the bounds of its capture.
"""

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from kernels.gpu.attention_kernels import paged_attention_kernel
from kernels.gpu.attention_merge import merge_partitions_kernel
from kernels.gpu.launch import (
    AttentionLaunch,
    attention_launch,
    decode_tile_rows,
    fewest_partition_keys,
    gpu_of,
    num_partitions,
    padded_dim,
    stride_unit,
)
from kernels.inputs.attention_options import AttentionOptions
from kernels.inputs.paged_batch import PagedBatch

_TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


@dataclass(frozen=True)
class _Call:
    """The arguments of one call."""

    out: Tensor
    query: Tensor
    k_cache: Tensor
    v_cache: Tensor
    batch: PagedBatch
    options: AttentionOptions

    @property
    def group_size(self) -> int:
        """Query heads that share a key head."""
        return self.query.shape[1] // self.k_cache.shape[2]

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of factors; sums are in float32."""
        if self.k_cache.dtype.itemsize == 1 or self.k_cache.dtype == self.query.dtype:
            return self.query.dtype
        return torch.float32

    @property
    def decode_rows(self) -> int:
        """Rows of a tile for short queries."""
        return decode_tile_rows(self.group_size, self.compute_dtype, max(self.padded_dims))

    @property
    def padded_dims(self) -> tuple[int, int]:
        return padded_dim(self.query.shape[2]), padded_dim(self.v_cache.shape[3])

    @property
    def heads_per_tile(self) -> int:
        return min(self.group_size, self.decode_rows)

    @property
    def num_head_tiles(self) -> int:
        return self.k_cache.shape[2] * -(-self.group_size // self.heads_per_tile)

    @property
    def decode_tokens(self) -> int:
        """The most query tokens of a sequence that fit into one small tile."""
        return self.decode_rows // self.heads_per_tile

    def launch(self, is_decode: bool) -> AttentionLaunch:
        return attention_launch(
            gpu_of(self.query.device),
            self.padded_dims,
            self.compute_dtype,
            self.k_cache.dtype,
            self.batch.block_size,
            self.decode_rows,
            is_decode,
        )


@dataclass(frozen=True)
class _Queries:
    """The queries of a launch, by the number of tokens of their sequence."""

    shortest: int
    longest: int
    one_tile: bool  # whether each sequence fits into one tile


@dataclass(frozen=True)
class _Partials:
    """Partial results of partitions, in the layout of `paged_attention_kernel`."""

    fewest_keys: int  # of a partition; a multiple of the tile
    sums: Tensor
    stats: Tensor


def paged_attention_triton(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    options: AttentionOptions,
    out: Tensor,
) -> Tensor:
    """As `kernels.attention.paged_attention`, without checks of block ids, which are on the device.

    Short and long queries take tiles of two sizes. If a batch may have both, the kernel is launched
    twice, and each launch skips the other's sequences.
    """
    num_tokens = query.shape[0]
    if num_tokens == 0:
        return out
    query = query if query.stride(2) == 1 else query.contiguous()
    call = _Call(out, query, k_cache, v_cache, batch, options)
    max_query_len = num_tokens if batch.max_query_len is None else batch.max_query_len
    has_long = max_query_len > call.decode_tokens
    # If all sequences have the longest query, none is short.
    has_short = not has_long or num_tokens < len(batch.seq_lens) * max_query_len
    if has_long:
        _attend_long(call, call.decode_tokens + 1 if has_short else 1)
    if has_short:
        _attend_short(call, min(max_query_len, call.decode_tokens))
    return out


def _attend_long(call: _Call, shortest_query: int) -> None:
    launch = call.launch(is_decode=False)
    num_tokens, num_seqs = call.query.shape[0], len(call.batch.seq_lens)
    # Each sequence may have a partial tile.
    num_tiles = num_tokens // (launch.tile_rows // call.heads_per_tile) + num_seqs
    queries = _Queries(shortest_query, num_tokens, one_tile=False)
    _attend(call, launch, (call.num_head_tiles, num_tiles, 1), queries, None)


def _attend_short(call: _Call, longest_query: int) -> None:
    """Launch for sequences of up to `longest_query` tokens; keys are partitioned if there are
    few."""
    launch = call.launch(is_decode=True)
    num_seqs, num_head_tiles = len(call.batch.seq_lens), call.num_head_tiles
    fewest_keys = fewest_partition_keys(call.options.partition_keys, launch.tile_keys)
    max_keys = call.batch.max_seq_len
    if max_keys is None:
        max_keys = call.batch.block_table.shape[1] * call.batch.block_size
    if call.options.sliding_window is not None:
        max_keys = min(max_keys, call.options.sliding_window + longest_query + launch.tile_keys)
    parts = -(-max_keys // fewest_keys)
    if call.options.partition_keys is None:
        gpu = gpu_of(call.query.device)
        parts = num_partitions(gpu, num_seqs * num_head_tiles, max_keys)
    queries = _Queries(1, longest_query, one_tile=True)
    grid = (num_head_tiles, num_seqs, max(parts, 1))
    if parts <= 1:
        _attend(call, launch, grid, queries, None)
        return
    partials = _Partials(
        fewest_keys,
        sums=call.query.new_empty(
            (num_seqs, num_head_tiles, parts, launch.tile_rows, call.v_cache.shape[3]),
            dtype=torch.float32,
        ),
        stats=call.query.new_empty(
            (num_seqs, num_head_tiles, parts, 2, launch.tile_rows), dtype=torch.float32
        ),
    )
    _attend(call, launch, grid, queries, partials)
    _merge(call, launch, longest_query, partials)


def _attend(
    call: _Call,
    launch: AttentionLaunch,
    grid: tuple[int, int, int],
    queries: _Queries,
    partials: _Partials | None,
) -> None:
    options = call.options
    strides = (
        *call.out.stride()[:2],
        *call.query.stride()[:2],
        *call.k_cache.stride()[:3],
        *call.v_cache.stride()[:3],
    )
    paged_attention_kernel[grid](
        call.out,
        call.query,
        call.k_cache,
        call.v_cache,
        call.batch.block_table,
        call.batch.query_start_loc,
        call.batch.seq_lens,
        _contiguous(options.sinks),
        None if partials is None else partials.sums,
        None if partials is None else partials.stats,
        len(call.batch.seq_lens),
        queries.shortest,
        queries.longest,
        0 if partials is None else partials.fewest_keys,
        grid[2],
        options.scale * options.k_scale,
        options.softcap,
        options.sliding_window,
        options.v_scale,
        *strides,
        call.batch.block_table.stride(0),
        GROUP_SIZE=call.group_size,
        HEADS_PER_TILE=call.heads_per_tile,
        HEAD_DIM=call.query.shape[2],
        V_HEAD_DIM=call.v_cache.shape[3],
        PADDED_DIM=padded_dim(call.query.shape[2]),
        PADDED_V_DIM=padded_dim(call.v_cache.shape[3]),
        BLOCK_SIZE=call.batch.block_size,
        TILE_ROWS=launch.tile_rows,
        TILE_KEYS=launch.tile_keys,
        STRIDE_UNIT=stride_unit(strides),
        COMPUTE_DTYPE=_TRITON_DTYPES[call.compute_dtype],
        PRECISION=launch.precision,
        ONE_TILE=queries.one_tile,
        PARTITIONED=partials is not None,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )


def _contiguous(numbers: Tensor | None) -> Tensor | None:
    return None if numbers is None else numbers.contiguous()


def _merge(call: _Call, launch: AttentionLaunch, longest_query: int, partials: _Partials) -> None:
    num_seqs, num_head_tiles, num_partitions = partials.stats.shape[:3]
    merge_partitions_kernel[(num_head_tiles, num_seqs, longest_query * call.heads_per_tile)](
        call.out,
        call.batch.query_start_loc,
        call.batch.seq_lens,
        partials.sums,
        partials.stats,
        longest_query,
        partials.fewest_keys,
        num_partitions,
        call.options.sliding_window,
        call.options.v_scale,
        *call.out.stride()[:2],
        GROUP_SIZE=call.group_size,
        HEADS_PER_TILE=call.heads_per_tile,
        V_HEAD_DIM=call.v_cache.shape[3],
        PADDED_V_DIM=padded_dim(call.v_cache.shape[3]),
        TILE_ROWS=launch.tile_rows,
        TILE_KEYS=launch.tile_keys,
        num_warps=4,
    )
