"""Makes the shards of a model one model: the outputs of attention and MLP are summed over the
ranks, and so are the embeddings, of which each rank has a part of the vocabulary.

This is done last. Until then a shard is a model by itself, without communication, so that parts are
compared and replaced on each rank as in any other model.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from torch import Tensor, nn

from worker_svc.model.checkpoint import ModelError
from worker_svc.model.decoder_layers import DecoderLayer, LayerStack
from worker_svc.model.fused_forward import FusedForward
from worker_svc.model.weight_packing import set_forward
from worker_svc.ranks.group import RankGroup

# The modules whose outputs each rank has a part of: one of attention, one of the MLP.
_ATTENTION: Final = re.compile(r".*\.(?:self_attn\.o_proj|attn\.c_proj)")
_MLP: Final = re.compile(r".*\.mlp")
_EXPERTS: Final = "experts"


@dataclass(frozen=True)
class SplitEmbedding:
    """The forward pass of an embedding of which each rank has some rows."""

    rows: Callable[[Tensor], Tensor]
    first: int
    num_rows: int
    group: RankGroup

    def __call__(self, ids: Tensor) -> Tensor:
        own = ids - self.first
        is_elsewhere = (own < 0) | (own >= self.num_rows)
        embedded = self.rows(own.masked_fill(is_elsewhere, 0))
        return self.group.sum(embedded.masked_fill(is_elsewhere.unsqueeze(-1), 0))


def sum_over_ranks(network: Any, group: RankGroup) -> None:
    """Add the sums to a prepared shard. ModelError if a layer has no place for one."""
    num_layers = network.config.num_hidden_layers
    for pattern in (_ATTENTION, _MLP):
        modules = [m for name, m in network.named_modules() if pattern.fullmatch(name)]
        if len(modules) != num_layers:
            raise ModelError(f"{type(network).__name__}: {len(modules)} of {num_layers} layers can "
                             "be split over ranks")  # fmt: skip
        for module in modules:
            _sum_output(getattr(module, _EXPERTS, module), group)
    stacks = _sum_in_fused_layers(network, group)
    embedding = network.get_input_embeddings()
    num_rows = network.config.vocab_size
    split = SplitEmbedding(embedding.forward, group.rank * num_rows, num_rows, group)
    set_forward(embedding, split)
    if isinstance(network.forward, FusedForward):
        network.forward = replace(network.forward, embed=split, layers=stacks[0])


def _sum_output(module: nn.Module, group: RankGroup) -> None:
    def summed(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        return group.sum(output)

    module.register_forward_hook(summed)


def _sum_in_fused_layers(network: nn.Module, group: RankGroup) -> list[LayerStack]:
    """Fused layers call the products in a module, and not the module. Returns the stacks of
    layers, which run in one call where the ranks share memory, and one by one elsewhere."""
    stacks = []
    for module in network.modules():
        forward = module.forward
        if isinstance(forward, DecoderLayer):
            set_forward(module, replace(forward, ranks=group))
        elif isinstance(forward, LayerStack):
            layers = [replace(layer, ranks=group) for layer in forward.layers]
            stacks.append(replace(forward, layers=layers))
            set_forward(module, stacks[-1])
    return stacks
