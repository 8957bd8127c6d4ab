"""Packed weights: the same results, one copy of each, and no read of a freed one."""

import pytest
import torch
from tiny_models import FAMILIES, random_logits, random_network
from torch import Tensor, nn

from kernels.dispatch import Implementation, cpp_implementations
from worker_svc.model.elementwise_fusion import fuse
from worker_svc.model.weight_packing import pack

_BEST = pytest.mark.parametrize("implementation", cpp_implementations()[-1:])


def num_freed(model: nn.Module) -> int:
    return sum(
        parameter.numel() > 1 and parameter.stride() == (0, 0) for parameter in model.parameters()
    )


@_BEST
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_models_give_the_same(implementation: Implementation, family: str, tied: bool) -> None:
    config = FAMILIES[family]()
    config.tie_word_embeddings = tied
    model = random_network(config)
    before = random_logits(model)
    fuse(model, implementation)
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    packed = pack(model, implementation)
    assert packed["products"] == len(linears)
    assert packed["gated products"] == (0 if family == "gpt2" else 3)
    after = random_logits(model)
    assert (after - before).abs().max() < 1e-4 * before.abs().max()


@_BEST
@pytest.mark.parametrize("tied", [False, True])
def test_a_weight_is_there_once(implementation: Implementation, tied: bool) -> None:
    config = FAMILIES["qwen3"]()
    config.tie_word_embeddings = tied
    model = random_network(config)
    num_weights = len({m.weight for m in model.modules() if type(m) is nn.Linear})
    pack(model, implementation)
    assert num_freed(model) == num_weights
    assert model.get_output_embeddings().weight.isnan().all()
    assert model.get_input_embeddings().weight.isnan().any() == tied


@_BEST
def test_no_file_stays_mapped_for_what_is_left(implementation: Implementation) -> None:
    model = random_network(FAMILIES["llama"]())
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    mapped = torch.empty(10**6)
    for norm in norms:
        norm.data = mapped[: norm.numel()].copy_(norm.data)
    pack(model, implementation)
    assert all(norm.untyped_storage().nbytes() == norm.nbytes for norm in norms)


@_BEST
def test_a_weight_with_another_reader_is_kept(implementation: Implementation) -> None:
    class Scaled(nn.Embedding):
        def forward(self, indices: Tensor) -> Tensor:
            return super().forward(indices) * 3

    embedding, head = Scaled(10, 4), nn.Linear(4, 10, bias=False)
    head.weight = embedding.weight
    model = nn.ModuleList([embedding, head])
    indices = torch.tensor([3, 9])
    with torch.inference_mode():
        looked_up, product = embedding(indices), head(embedding(indices))
        assert pack(model, implementation) == {"products": 1}
        assert embedding(indices).equal(looked_up)
        torch.testing.assert_close(head(embedding(indices)), product)


@_BEST
def test_in_half_precision(implementation: Implementation) -> None:
    model = random_network(FAMILIES["llama"]()).to(torch.bfloat16)
    before = random_logits(model)
    pack(model, implementation)
    assert (random_logits(model) - before).abs().max() < 0.05 * before.abs().max()


def test_without_kernels_nothing_is_exchanged() -> None:
    model = random_network(FAMILIES["llama"]())
    assert not pack(model, Implementation.TORCH)
    assert num_freed(model) == 0
