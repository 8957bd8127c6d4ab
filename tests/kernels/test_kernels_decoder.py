"""Invalid arguments of decoder layers and passes. The worker's tests of layers check results."""

import pytest
import torch

from kernels.decoder import (
    DecoderCaches,
    DecoderWeights,
    EmbeddingAndHead,
    LayerWeights,
    decoder_forward,
    decoder_layers,
)
from kernels.dispatch import Implementation, cpp_implementations
from kernels.fused import Activation
from kernels.inputs.paged_batch import PagedBatch
from kernels.linear import PackedLinear, PackedWeight

_HIDDEN, _DIM = 8, 4


def layer(implementation: Implementation) -> LayerWeights:
    def product(num_inputs: int, num_outputs: int) -> PackedLinear:
        return PackedLinear(
            PackedWeight.of(torch.randn(num_outputs, num_inputs), implementation), None
        )

    ones = torch.ones(_HIDDEN)
    return LayerWeights(
        attention_norm=ones,
        attention_epsilon=1e-6,
        qkv_proj=product(_HIDDEN, 4 * _DIM),
        head_norms=None,
        head_epsilon=0.0,
        scale=0.5,
        sliding_window=None,
        o_proj=product(2 * _DIM, _HIDDEN),
        mlp_norm=ones,
        mlp_epsilon=1e-6,
        gate=product(_HIDDEN, 12),
        up=product(_HIDDEN, 12),
        down=product(12, _HIDDEN),
    )


@pytest.mark.parametrize("implementation", cpp_implementations()[-1:])
def test_what_does_not_fit_is_refused(implementation: Implementation) -> None:
    torch.manual_seed(0)
    weights = DecoderWeights([layer(implementation)] * 2, 2, Activation.SILU)
    batch = PagedBatch(
        torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, 3]), torch.tensor([3]), 4
    )
    states, angles, slots = torch.randn(3, _HIDDEN), torch.randn(1, 3, _DIM), torch.arange(3)
    caches = [torch.zeros(1, 4, 1, _DIM) for _ in range(4)]

    def run(states: torch.Tensor, angles: torch.Tensor, caches: list[torch.Tensor]) -> torch.Tensor:
        scaled = DecoderCaches(caches, [1.0] * 4)
        return decoder_layers(states, angles, angles, weights, scaled, batch, slots)

    assert run(states, angles, caches).isfinite().all()
    with pytest.raises(RuntimeError, match="the same number of layers"):
        run(states, angles, caches[:2])
    with pytest.raises(RuntimeError, match="states must be dense"):
        run(states.unsqueeze(0), angles, caches)
    with pytest.raises(RuntimeError, match="cosines and sines must be"):
        run(states, angles[:, :2], caches)
    with pytest.raises(RuntimeError, match="do not fit the cache"):
        run(states, angles, [*caches[:3], torch.zeros(1, 4, 1, 2 * _DIM)])


@pytest.mark.parametrize("implementation", cpp_implementations()[-1:])
def test_what_is_not_there_is_refused(implementation: Implementation) -> None:
    torch.manual_seed(0)
    weights = DecoderWeights([layer(implementation)], 2, Activation.SILU)
    batch = PagedBatch(
        torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, 3]), torch.tensor([3]), 4
    )
    caches = DecoderCaches([torch.zeros(1, 4, 1, _DIM) for _ in range(2)], [1.0, 1.0])
    head = PackedLinear(PackedWeight.of(torch.randn(10, _HIDDEN), implementation), None)

    def run(
        ids: list[int],
        positions: list[int],
        kept: list[int],
        hidden: int = _HIDDEN,
        table: torch.dtype = torch.float32,
    ) -> torch.Tensor:
        angles = torch.randn(6, _DIM, dtype=table)
        embedding = torch.randn(9, hidden, 1)
        ends = EmbeddingAndHead(embedding, 9, angles, angles, torch.ones(_HIDDEN), 1e-6, head)
        numbers = (torch.tensor(one, dtype=torch.int64) for one in (ids, positions, kept))
        return decoder_forward(*numbers, ends, weights, caches, batch, torch.arange(3))

    assert run([0, 8, 2], [0, 5, 1], [2, 0]).shape == (2, 10)
    assert run([0, 8, 2], [0, 5, 1], []).shape == (0, 10)
    for ids, positions, kept in (
        ([0, 9, 2], [0, 5, 1], [0]),
        ([0, -1, 2], [0, 5, 1], [0]),
        ([0, 8, 2], [0, 6, 1], [0]),
        ([0, 8, 2], [0, 5, 1], [3]),
        ([], [], [0]),
    ):
        with pytest.raises(IndexError):
            run(ids, positions, kept)
    with pytest.raises(RuntimeError, match="rows must be 3 dense"):
        run([0, 8, 2], [0, 5], [0])
    with pytest.raises(RuntimeError, match="the output must be"):
        run([0, 8, 2], [0, 5, 1], [0], table=torch.bfloat16)
    with pytest.raises(RuntimeError, match="a number per column"):
        run([0, 8, 2], [0, 5, 1], [0], hidden=2 * _HIDDEN)
