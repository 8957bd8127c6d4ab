"""Shards of checkpoints that are quantised: together they give what the whole model gives."""

from pathlib import Path

import pytest
import torch
from quantized_checkpoints import FORMATS, write_checkpoint
from rank_threads import rank_threads
from shard_models import logits_of, prepared
from transformers import LlamaConfig

from kernels.quantized import QuantizedWeight
from worker_svc.errors import WrongSettingError
from worker_svc.model.loading import load_model
from worker_svc.model.quantized.checkpoint_tensors import StoredWeight
from worker_svc.model.shards.narrowing import rules_of
from worker_svc.model.shards.quantized_parts import part_of_weight
from worker_svc.model.shards.shard import Shard
from worker_svc.model.shards.splits import rule_of

# Sums in another order.
_TOLERANCE = 1e-3


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [
        *(
            (name, 2)
            for name in ("gptq-4", "gptq-8", "awq", "w8a8", "w8a16", "w4a16-zeros", "w4a16-channel")
        ),
        *(
            pytest.param(name, 4, marks=pytest.mark.slow)
            for name in ("gptq-4-v2", "awq-128", "w8a8-zeros", "w8a16-plain", "w4a16")
        ),
    ],
)
def test_quantised_checkpoints_are_split(name: str, num_ranks: int, tmp_path: Path) -> None:
    model = write_checkpoint(FORMATS[name], tmp_path, tied=name == "awq")
    expected = logits_of(prepared(model))
    with rank_threads(num_ranks) as ranks:
        # transformers loads one model at a time.
        shards = [prepared(model, group) for group in ranks.groups]
        found = ranks.run(lambda rank: logits_of(shards[rank]))[0]
    exact = logits_of(prepared(model / "expected"))
    rounding = (expected - exact).abs().max()
    if name in ("w8a8", "w8a8-zeros", "gptq-8") and rounding > 0:
        # Products of integers round their inputs, and each rank has other ones.
        assert (found - exact).abs().max() < 2 * rounding
    else:
        assert (found - expected).abs().max() < _TOLERANCE * expected.abs().max()


def test_each_rank_keeps_its_part_of_the_integers(tmp_path: Path) -> None:
    model = str(write_checkpoint(FORMATS["w4a16-zeros"], tmp_path))

    def num_kept(shard: Shard | None) -> int:
        loaded = load_model(model, None, "auto", torch.device("cpu"), None, shard=shard)
        return sum(source().values.numel() for source in loaded.quantized.values())

    assert 2 * num_kept(Shard(1, 2)) == num_kept(None)


def weight_of(num_outputs: int, num_inputs: int, group_size: int) -> QuantizedWeight:
    values = torch.arange(num_outputs * num_inputs, dtype=torch.uint8).view(num_outputs, -1)
    scales = torch.rand(num_outputs, num_inputs // group_size)
    return QuantizedWeight(values, 8, scales, scales * 3, group_size)


def part_of(weight: QuantizedWeight, layer: str, shard: Shard) -> QuantizedWeight:
    stored = StoredWeight((weight.num_outputs, weight.num_inputs), (), 0, lambda: weight)
    rule = rule_of(f"{layer}.weight", rules_of(LlamaConfig()))
    part = part_of_weight(layer, stored, rule, shard, 2)
    assert part.read().values.shape == part.shape
    return part.read()


@pytest.mark.parametrize("group_size", [4, 8, 24])
def test_scales_follow_the_inputs_of_a_rank(group_size: int) -> None:
    weight = weight_of(3, 24, group_size)
    found = [part_of(weight, "layers.0.mlp.down_proj", Shard(i, 3)) for i in range(3)]
    assert torch.equal(torch.cat([part.dequantize() for part in found], 1), weight.dequantize())


def test_scales_follow_the_outputs_of_a_rank() -> None:
    weight = weight_of(8, 12, 4)
    found = [part_of(weight, "layers.0.self_attn.k_proj", Shard(i, 4)) for i in range(4)]
    rows = torch.cat([part.dequantize() for part in found])
    # Two heads of four outputs, each of two ranks.
    assert torch.equal(
        rows, weight.dequantize()[[*range(4), *range(4), *range(4, 8), *range(4, 8)]]
    )
    head = [part_of(weight_of(5, 12, 4), "lm_head", Shard(i, 2)) for i in range(2)]
    assert not head[1].dequantize()[2:].any()


def test_refuses_parts_of_groups() -> None:
    with pytest.raises(WrongSettingError, match=r"24 inputs of .*\.down_proj are not whole groups"):
        part_of(weight_of(3, 48, 16), "layers.0.mlp.down_proj", Shard(0, 2))


def test_refuses_inputs_in_an_order_of_their_own(tmp_path: Path) -> None:
    model = write_checkpoint(FORMATS["gptq-4-act-order"], tmp_path)
    with rank_threads(2) as ranks, pytest.raises(WrongSettingError, match="act-order"):
        prepared(model, ranks.groups[0])
