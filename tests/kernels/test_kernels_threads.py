"""Results do not depend on the number of threads or on delays of some."""

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from subprocess import run

import pytest
import torch
from torch import Tensor

from kernels.decoder import DecoderCaches, DecoderWeights, LayerWeights, decoder_layers
from kernels.dispatch import cpp_implementations
from kernels.fused import Activation
from kernels.inputs.paged_batch import PagedBatch
from kernels.linear import PackedLinear, PackedWeight

pytestmark = pytest.mark.skipif(not cpp_implementations(), reason="no compiled kernels")

_HIDDEN, _DIM, _NUM_HEADS, _NUM_LAYERS = 96, 16, 6, 12
_BLOCK_SIZE, _NUM_BLOCKS = 8, 300


def _layer() -> LayerWeights:
    implementation = cpp_implementations()[-1]

    def product(num_inputs: int, num_outputs: int) -> PackedLinear:
        weight = torch.randn(num_outputs, num_inputs) * num_inputs**-0.5
        return PackedLinear(PackedWeight.of(weight, implementation), None)

    return LayerWeights(
        attention_norm=torch.ones(_HIDDEN),
        attention_epsilon=1e-6,
        qkv_proj=product(_HIDDEN, (_NUM_HEADS + 4) * _DIM),
        head_norms=None,
        head_epsilon=0.0,
        scale=0.25,
        sliding_window=None,
        o_proj=product(_NUM_HEADS * _DIM, _HIDDEN),
        mlp_norm=torch.ones(_HIDDEN),
        mlp_epsilon=1e-6,
        gate=product(_HIDDEN, 320),
        up=product(_HIDDEN, 320),
        down=product(320, _HIDDEN),
    )


def _layers(seq_lens: list[int], query_lens: list[int]) -> Callable[[], tuple[Tensor, Tensor]]:
    """A call of some layers with its arguments; it returns the output and the caches."""
    torch.manual_seed(0)
    weights = DecoderWeights([_layer() for _ in range(_NUM_LAYERS)], _NUM_HEADS, Activation.SILU)
    num_tokens = sum(query_lens)
    width = max(-(-length // _BLOCK_SIZE) for length in seq_lens)
    table = torch.randperm(_NUM_BLOCKS)[: len(seq_lens) * width].view(len(seq_lens), width).int()
    starts = torch.tensor([0, *query_lens]).cumsum(0)
    slots = torch.tensor(
        [
            int(table[seq, position // _BLOCK_SIZE]) * _BLOCK_SIZE + position % _BLOCK_SIZE
            for seq, (end, count) in enumerate(zip(seq_lens, query_lens, strict=True))
            for position in range(end - count, end)
        ]
    )
    batch = PagedBatch(table, starts, torch.tensor(seq_lens), _BLOCK_SIZE)
    states = torch.randn(num_tokens, _HIDDEN)
    angles = torch.randn(1, num_tokens, _DIM)
    filled = torch.randn(2 * _NUM_LAYERS, _NUM_BLOCKS, _BLOCK_SIZE, 2, _DIM)

    def call() -> tuple[Tensor, Tensor]:
        caches = filled.clone()
        out = decoder_layers(
            states,
            angles.cos(),
            angles.sin(),
            weights,
            DecoderCaches(list(caches), [1.0] * 2 * _NUM_LAYERS),
            batch,
            slots,
        )
        return out, caches

    return call


_BATCHES = {
    "decoding": ([31, 17, 40, 1, 8, 9, 25, 33], [1] * 8),
    "one row": ([450], [1]),
    "prompts": ([60, 100, 37], [60, 64, 37]),
    # So many tokens that results share buffers.
    "long prompts": ([700, 700, 700], [700, 700, 700]),
}


@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param(lengths, id=name, marks=[] if name == "prompts" else pytest.mark.slow)
        for name, lengths in _BATCHES.items()
    ],
)
def test_scheduling_of_threads_changes_no_bit(lengths: tuple[list[int], list[int]]) -> None:
    """With more threads than cores, some stall during a chunk, which others execute again. The
    items of prompts depend on the number of threads, and with them rounding."""
    call = _layers(*lengths)
    is_decoding = max(lengths[1]) == 1
    torch.set_num_threads(1)
    alone = call()
    for num_threads in (2, 3, 4 * (os.cpu_count() or 1)):
        torch.set_num_threads(num_threads)
        first = call()
        for one, other in zip(first, alone, strict=True):
            if is_decoding:
                assert one.equal(other)
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        for _ in range(20):
            assert all(one.equal(other) for one, other in zip(call(), first, strict=True))


def test_concurrent_callers() -> None:
    call = _layers(*_BATCHES["decoding"])
    torch.set_num_threads(2)
    expected, _ = call()
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: call()[0], range(200)))
    assert all(result.equal(expected) for result in results)


_FORKED = """
import os, sys
import torch
from kernels.dispatch import cpp_implementations
from kernels.linear import PackedWeight, linear

weight = PackedWeight.of(torch.randn(256, 64), cpp_implementations()[-1])
states = torch.randn(32, 64)
torch.set_num_threads(2)
expected = linear(states, weight)
child = os.fork()
if not child:
    same = linear(states, weight).equal(expected)
    os._exit(0 if same and len(os.listdir("/proc/self/task")) > 1 else 1)
_, status = os.waitpid(child, 0)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_a_forked_process_computes() -> None:
    """It has none of its parent's threads, and starts its own."""
    done = run([sys.executable, "-c", _FORKED], timeout=120)
    assert done.returncode == 0
