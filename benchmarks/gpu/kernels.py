"""The kernels, compared with copies on the device and with FlashAttention."""

from functools import partial

import torch

from benchmarks.gpu.device import Calls, Device
from benchmarks.gpu.paged import DTYPE, PagedTensors, Shape
from benchmarks.report import Cell, Column, Part, Target
from kernels.kv_write import kv_write, kv_write_reference

_BLOCK_SIZES = (16, 256)
_TIMES_THE_CACHE = 4
# Each is a node or more of a graph. Small tensors stay in the cache, as between layers of a step.
_MOST_WORKING_SETS = 256
# Targets: share of the bandwidth of copies, and of FlashAttention's speed.
_OF_COPIES, _OF_FLASH = 0.8, 0.7

Row = dict[str, Cell]


def writes(device: Device, num_tokens: int = 65_536) -> Part:
    """Measure writes of keys and values of many tokens to their slots."""
    rows = [_write_row(device, num_tokens, block_size) for block_size in _BLOCK_SIZES]
    return Part(
        name="kv_write",
        title="Writes to the cache",
        notes=[OF_COPY_NOTE],
        columns=[*_WHAT, Column("gbs", "GB/s", ",.0f"), *_SHARE],
        rows=rows,
        targets=[target(f"kv_write, {r['what']}", _OF_COPIES, r["of_copy"]) for r in rows],
    )


def _write_row(device: Device, num_tokens: int, block_size: int) -> Row:
    num_heads, head_dim, where = 8, 128, device.torch_device
    num_bytes = 2 * 2 * num_tokens * num_heads * head_dim * DTYPE.itemsize
    num_sets = num_working_sets(device, num_bytes)
    size = (num_sets, 2, num_tokens, num_heads, head_dim)
    states = torch.randn(size, device=where, dtype=DTYPE)
    caches = torch.zeros(
        num_sets, 2, num_tokens // block_size, block_size, num_heads, head_dim,
        device=where, dtype=DTYPE,
    )  # fmt: skip
    blocks = torch.randperm(num_tokens // block_size, device=where).unsqueeze(1)
    slots = (blocks * block_size + torch.arange(block_size, device=where)).flatten()
    for states_of_set, caches_of_set in zip(states, caches, strict=True):
        _check_write(states_of_set, caches_of_set, slots)
    functions: dict[str, Calls] = {
        "ours": [
            partial(kv_write, keys, values, k_cache, v_cache, slots)
            for (keys, values), (k_cache, v_cache) in zip(states, caches, strict=True)
        ],
        "copy": copies(device, num_bytes),
    }
    seconds = device.median_seconds(functions)
    what = f"{num_tokens} tokens of {num_heads} heads of {head_dim}, blocks of {block_size}"
    return _share_row(what, num_bytes, seconds)


def _check_write(states: torch.Tensor, caches: torch.Tensor, slots: torch.Tensor) -> None:
    expected = torch.zeros_like(caches)
    kv_write_reference(states[0], states[1], expected[0], expected[1], slots)
    kv_write(states[0], states[1], caches[0], caches[1], slots)
    if not torch.equal(caches, expected):
        raise ValueError("kv_write differs from its reference")


def decode(device: Device, scale: int = 1) -> Part:
    """Measure attention with one query per sequence. `scale` divides the work."""
    sizes = [(256, 1024, 16, 8), (256, 2048, 32, 8), (16, 16_384, 16, 8), (1, 131_072, 32, 8)]
    shapes = [
        Shape(-(-num_seqs // scale), seq_len // scale, 1, block_size, num_heads, num_kv_heads)
        for num_seqs, seq_len, num_heads, num_kv_heads in sizes
        for block_size in _BLOCK_SIZES
    ]
    rows = [_decode_row(device, shape) for shape in shapes]
    return Part(
        name="decode",
        title="Attention of decoded tokens",
        notes=[
            f"Sequences x length; bytes are those of keys and values, read once. {OF_COPY_NOTE} "
            "*Torch*: the time of torch's attention on contiguous keys and values over that of "
            "Quire's kernel."
        ],
        columns=[*_WHAT, Column("gbs", "GB/s", ",.0f"), *_SHARE, Column("torch", "torch", ".2f")],
        rows=rows,
        targets=[target(f"decode, {r['what']}", _OF_COPIES, r["of_copy"]) for r in rows],
    )


def _decode_row(device: Device, shape: Shape) -> Row:
    num_sets = num_working_sets(device, shape.read_bytes)
    batches = [PagedTensors(shape, device.torch_device) for _ in range(num_sets)]
    for batch in batches:
        batch.check()
    functions: dict[str, Calls] = {
        "ours": [batch.attend for batch in batches],
        "torch": [partial(batch.attend_in_order, flash=False) for batch in batches],
        "copy": copies(device, shape.read_bytes),
    }
    seconds = device.median_seconds(functions)
    row = _share_row(shape.title, shape.read_bytes, seconds)
    return {**row, "torch": seconds["torch"] / seconds["ours"]}


def prefill(device: Device, scale: int = 1) -> Part:
    """Measure attention of whole prompts."""
    sizes = [(16, 1024, 16, 8), (8, 2048, 32, 8), (2, 8192, 32, 8)]
    shapes = [
        Shape(
            -(-num_seqs // scale),
            seq_len // scale,
            seq_len // scale,
            block_size,
            num_heads,
            num_kv_heads,
        )
        for num_seqs, seq_len, num_heads, num_kv_heads in sizes
        for block_size in _BLOCK_SIZES
    ]
    rows = [_prefill_row(device, shape) for shape in shapes]
    return Part(
        name="prefill",
        title="Attention of whole prompts",
        notes=[
            "Prompts x length; masked keys are not counted as operations. *Of flash*: the speed as "
            "a share of that of torch's FlashAttention on contiguous keys and values."
        ],
        columns=[
            *_WHAT,
            Column("tflops", "TFLOP/s", ",.0f"),
            Column("of_flash", "of flash", ".2f"),
        ],
        rows=rows,
        targets=[target(f"prefill, {r['what']}", _OF_FLASH, r["of_flash"]) for r in rows],
    )


def _prefill_row(device: Device, shape: Shape) -> Row:
    num_sets = num_working_sets(device, shape.read_bytes)
    batches = [PagedTensors(shape, device.torch_device) for _ in range(num_sets)]
    for batch in batches:
        batch.check()
    functions: dict[str, Calls] = {
        "ours": [batch.attend for batch in batches],
        "flash": [batch.attend_in_order for batch in batches],
    }
    seconds = device.median_seconds(functions)
    return {
        "what": shape.title,
        "us": 1e6 * seconds["ours"],
        "tflops": shape.flops / seconds["ours"] / 1e12,
        "of_flash": seconds["flash"] / seconds["ours"],
    }


def num_working_sets(device: Device, num_bytes: int) -> int:
    """Return how many working sets exceed the device's cache, or the largest number if none do."""
    return min(2 + _TIMES_THE_CACHE * device.cache_bytes // num_bytes, _MOST_WORKING_SETS)


def copies(device: Device, num_bytes: int) -> Calls:
    """Return copies that read and write `num_bytes` in all."""
    half = num_bytes // 2
    size = (num_working_sets(device, num_bytes), 2, half)
    parts = torch.randint(0, 127, size, device=device.torch_device, dtype=torch.uint8)
    return [partial(target.copy_, source) for source, target in parts]


def _share_row(what: str, num_bytes: int, seconds: dict[str, float]) -> Row:
    return {
        "what": what,
        "us": 1e6 * seconds["ours"],
        "gbs": num_bytes / seconds["ours"] / 1e9,
        "of_copy": seconds["copy"] / seconds["ours"],
    }


def target(what: str, aim: float, measured: Cell) -> Target:
    assert isinstance(measured, float)
    return Target(what, f"at least {aim}", f"{measured:.2f}", measured >= aim)


_WHAT = [Column("what", "what"), Column("us", "us", ",.1f")]
_SHARE = [Column("of_copy", "of copies", ".2f")]
OF_COPY_NOTE = (
    "*Of copies*: the rate of bytes read and written as a share of that of a copy within the "
    "device that moves as many bytes, measured alternately."
)
