"""How many blocks a pool has, and how many it must have: arithmetic, nothing else."""

from dataclasses import dataclass

from worker_svc.settings import WrongSettingError, size_text

_CPU_CACHE_BYTES = 2**30
# What a GPU's driver hands out at once: a tensor may have so many bytes more than it needs.
_GRANULE = 2 * 2**20


@dataclass(frozen=True)
class PoolSize:
    """Blocks on the device, the null block included, and on the host."""

    num_blocks: int
    num_host_blocks: int


@dataclass(frozen=True)
class DeviceMemory:
    """What a GPU's memory goes to before there is a cache, in bytes."""

    total: int
    others: int  # taken before: by other processes, and by the driver for this one
    weights: int
    peak_activations: int  # of the largest batch, its sampling included
    non_torch: int  # what libraries took beside torch while it ran
    # What comes after the cache (`later_bytes`). Where the utilization decides, there is room for
    # it in what that leaves.
    later: int = 0

    def left_of(self, num_bytes: int) -> int:
        """What remains of so many bytes that this process may take; negative if it needs more."""
        return num_bytes - self.weights - self.peak_activations - self.non_torch

    @property
    def left(self) -> int:
        """What remains of all there is."""
        return self.left_of(self.total - self.others - self.later)


def later_bytes(
    peak_activations: int,
    max_num_batched_tokens: int,
    graph_rows: int,
    vocab_size: int,
    table_bytes: int,
    num_caches: int,
) -> int:
    """What a GPU still has to give when the cache is there: graphs of up to `graph_rows` rows, 0
    for none, with the logits that they leave; tables and buffers of `table_bytes`; what rounding
    adds to each cache tensor.

    Graphs have memory of their own, in which they all lie: a part of what the largest batch took.
    """
    of_graphs = peak_activations * min(graph_rows, max_num_batched_tokens) // max_num_batched_tokens
    return of_graphs + graph_rows * vocab_size * 4 + table_bytes + num_caches * _GRANULE


def cache_block_bytes(block_size: int, token_bytes: int) -> int:
    """`token_bytes` are those of all layers: Σ num_kv_heads × (key_dim + value_dim) × dtype
    bytes."""
    return block_size * token_bytes


def cache_memory(
    asked: int | None, gpu_memory_utilization: float, memory: DeviceMemory | None
) -> int:
    """Bytes for the cache: what is asked for, else what the utilization leaves of the GPU, but no
    more than is there. Without a GPU, whose `memory` is then None, 1 GiB.

    The utilization is this worker's share, whatever other processes take: two workers may have
    0.45 each. WrongSettingError, with both numbers, if there is not as much.
    """
    if memory is None:
        return _CPU_CACHE_BYTES if asked is None else asked
    if asked is None:
        share = int(memory.total * gpu_memory_utilization)
        if (left := min(memory.left_of(share), memory.left)) > 0:
            return left
        raise WrongSettingError(
            f"nothing is left for the cache of {size_text(share)}, which is "
            f"{gpu_memory_utilization} of the GPU: {_taken(memory)}; raise "
            "--gpu-memory-utilization, or lower --max-num-batched-tokens or --max-num-seqs"
        )
    if asked > memory.left:
        raise WrongSettingError(
            f"a cache of {size_text(asked)} is asked for, but {size_text(max(memory.left, 0))} of "
            f"the GPU's {size_text(memory.total)} are left: {_taken(memory)}; lower "
            "--kv-cache-memory or --num-blocks"
        )
    return asked


def _taken(memory: DeviceMemory) -> str:
    return (
        f"weights take {size_text(memory.weights)}, the largest batch "
        f"{size_text(memory.peak_activations)}, libraries {size_text(memory.non_torch)}, graphs "
        f"and tables {size_text(memory.later)}, others {size_text(memory.others)}"
    )


def host_blocks(swap_space: int, block_bytes: int) -> int:
    """Blocks that fit into the swap space. WrongSettingError if there is some, but for none."""
    if 0 < swap_space < block_bytes:
        raise WrongSettingError(
            f"--swap-space: {size_text(swap_space)} do not hold one block of "
            f"{size_text(block_bytes)}; give it more, or 0 for none"
        )
    return swap_space // block_bytes


def require_host_memory(cache_bytes: int, swap_bytes: int, host_bytes: int) -> None:
    """WrongSettingError, with both numbers, if the host cannot hold its part of the blocks.
    `cache_bytes` are 0 where the cache lies on a GPU."""
    if cache_bytes + swap_bytes <= host_bytes:
        return
    what = "--swap-space" if not cache_bytes else "--kv-cache-memory, --num-blocks or --swap-space"
    raise WrongSettingError(
        f"the cache takes {size_text(cache_bytes)} and swapped blocks {size_text(swap_bytes)} of "
        f"the host's memory, which is {size_text(host_bytes)}; lower {what}"
    )


def require_room(num_blocks: int, block_size: int, max_model_len: int) -> None:
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
