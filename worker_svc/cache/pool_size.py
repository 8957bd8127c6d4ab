"""Arithmetic of the pool's size: how many blocks fit, and how many are needed."""

from collections.abc import Sequence
from dataclasses import dataclass

from worker_svc.errors import WrongSettingError
from worker_svc.sizes import size_text

_CPU_CACHE_BYTES = 2**30
# The allocation unit of a GPU's driver, to which a large tensor is rounded up.
_GRANULE = 2 * 2**20
# torch's allocator has segments of 2 MiB for tensors of up to 1 MiB, and of 20 MiB for those of up
# to 10. Its peak counts tensors only, and graphs and each stream have segments of their own.
_SEGMENTS = 22 * 2**20
# cuBLAS' workspace, which torch allocates per stream: that of GPUs of compute capability 9.0 on.
_WORKSPACE = 32 * 2**20


@dataclass(frozen=True)
class PoolSize:
    """Blocks on the device, the null block included, and on the host."""

    num_blocks: int
    num_host_blocks: int


@dataclass(frozen=True)
class DeviceMemory:
    """Use of a GPU's memory before the cache is allocated, in bytes."""

    total: int
    others: int  # other processes, and the driver for this one
    weights: int
    peak_activations: int  # of the largest batch, its sampling included
    non_torch: int  # allocated by libraries during that batch
    allocated_later: int = 0  # after the cache (`bytes_allocated_later`)

    def free_for_cache_within(self, num_bytes: int) -> int:
        """What remains for the cache if this process may use `num_bytes`; may be negative."""
        return num_bytes - self.weights - self.peak_activations - self.non_torch

    @property
    def free_for_cache(self) -> int:
        """What remains for the cache if this process may use all free memory."""
        return self.free_for_cache_within(self.total - self.others - self.allocated_later)


def bytes_allocated_later(
    peak_activations: int,
    max_num_batched_tokens: int,
    graph_sizes: Sequence[int],
    vocab_size: int,
    table_bytes: int,
    num_caches: int,
) -> int:
    """Memory that is allocated after the cache: graphs of these numbers of rows with their logits,
    tables and buffers of `table_bytes`, and the rounding of each cache tensor and of a step's.

    All graphs share one pool, whose size is estimated from the largest batch, and are captured in a
    stream of their own. What the driver keeps of each is an estimate, too.
    """
    of_caches = num_caches * _GRANULE
    of_graphs = 0
    if graph_sizes:
        most_rows = max(graph_sizes)
        of_batch = min(most_rows, max_num_batched_tokens)
        of_graphs = peak_activations * of_batch // max_num_batched_tokens
        of_graphs += most_rows * vocab_size * 4
        of_graphs += _WORKSPACE + _SEGMENTS + len(graph_sizes) * _GRANULE
    return of_graphs + table_bytes + of_caches + _SEGMENTS


def cache_memory(
    requested: int | None, gpu_memory_utilization: float, memory: DeviceMemory | None
) -> int:
    """Bytes of the cache: as requested, else what `gpu_memory_utilization` leaves, limited by free
    memory. Without a GPU `memory` is None, and the default is 1 GiB.

    The utilization is this worker's share, whatever other processes use: two workers may have 0.45
    each. WrongSettingError, with both numbers, if the memory does not suffice.
    """
    if memory is None:
        return _CPU_CACHE_BYTES if requested is None else requested
    if requested is None:
        share = int(memory.total * gpu_memory_utilization)
        if (free := min(memory.free_for_cache_within(share), memory.free_for_cache)) > 0:
            return free
        raise WrongSettingError(
            f"nothing is left for the cache of {size_text(share)}, which is "
            f"{gpu_memory_utilization} of the GPU: {_taken(memory)}; raise "
            "--gpu-memory-utilization, or lower --max-num-batched-tokens or --max-num-seqs"
        )
    if requested > memory.free_for_cache:
        raise WrongSettingError(
            f"a cache of {size_text(requested)} is requested, but "
            f"{size_text(max(memory.free_for_cache, 0))} of the GPU's {size_text(memory.total)} "
            f"are left: {_taken(memory)}; lower --kv-cache-memory or --num-blocks"
        )
    return requested


def _taken(memory: DeviceMemory) -> str:
    return (
        f"weights take {size_text(memory.weights)}, the largest batch "
        f"{size_text(memory.peak_activations)}, libraries {size_text(memory.non_torch)}, graphs "
        f"and tables {size_text(memory.allocated_later)}, others {size_text(memory.others)}"
    )


def host_blocks(swap_space: int, block_bytes: int) -> int:
    """Blocks that fit into the swap space. WrongSettingError if it is too small for one."""
    if 0 < swap_space < block_bytes:
        raise WrongSettingError(
            f"--swap-space: {size_text(swap_space)} is less than one block of "
            f"{size_text(block_bytes)}; raise it, or set 0 for none"
        )
    return swap_space // block_bytes


def require_host_memory(
    cache_bytes: int, swap_bytes: int, host_bytes: int, num_ranks: int = 1
) -> None:
    """WrongSettingError, with both numbers, if the host cannot hold its part of the blocks of its
    ranks. The sizes are those of one rank; `cache_bytes` are 0 where the cache lies on a GPU."""
    if num_ranks * (cache_bytes + swap_bytes) <= host_bytes:
        return
    of_ranks = f" in each of {num_ranks} ranks" if num_ranks > 1 else ""
    what = "--swap-space" if not cache_bytes else "--kv-cache-memory, --num-blocks or --swap-space"
    raise WrongSettingError(
        f"the cache needs {size_text(cache_bytes)} and swapped blocks {size_text(swap_bytes)}"
        f"{of_ranks} of the host's memory, which is {size_text(host_bytes)}; lower {what}"
    )


def require_capacity(num_blocks: int, block_size: int, max_model_len: int) -> None:
    """WrongSettingError, with both numbers, if the longest sequence does not fit beside the null
    block."""
    usable = max(num_blocks - 1, 0)
    needed = -(-max_model_len // block_size)
    if usable < needed:
        raise WrongSettingError(
            f"a sequence of {max_model_len} tokens needs {needed} blocks, but only {usable} can be "
            "used; raise --kv-cache-memory or --num-blocks (--gpu-memory-utilization on a GPU), "
            "lower --max-model-len, or set --kv-cache-dtype=fp8_e4m3"
        )
