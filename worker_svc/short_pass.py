"""The forward pass of a model whose layers run in one call, without what transformers does around
them in every step: masks and caches, which nobody looks at, and the last norm of tokens whose
logits nobody asked for. Where its ends are what most models have, all of it is one call."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import structlog
import torch
from torch import Tensor, nn

from kernels.attention import PagedBatch
from kernels.decoder import Ends
from kernels.linear import PackedWeight, Product
from worker_svc.attention import PagedAttention, attending_with
from worker_svc.decoder_layers import LayerStack
from worker_svc.fusing import RmsNorm

log = structlog.get_logger()

_NETWORK_PARTS: Final = {"model", "lm_head"}
_MODEL_PARTS: Final = {"embed_tokens", "layers", "norm", "rotary_emb"}
# Of cosines and sines: more would be felt beside a small model's weights.
_LARGEST_TABLE_BYTES: Final = 64 * 2**20


@dataclass(frozen=True)
class Output:
    """As much of transformers' output as is needed."""

    logits: Tensor


@dataclass(frozen=True)
class ShortPass:
    """The parts of such a model, one after the other."""

    embed: Callable[[Tensor], Tensor]
    turn: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    layers: LayerStack
    norm: Callable[[Tensor], Tensor]
    head: Callable[[Tensor], Tensor]
    ends: Ends | None  # the same parts once more, if one call can run all of them

    def __call__(
        self,
        *,
        input_ids: Tensor,
        position_ids: Tensor,
        logits_to_keep: Tensor,
        use_cache: Literal[False],
    ) -> Output:
        """As the model is called here, and by nobody else: without a cache of transformers' own."""
        logits = self.in_one_call(input_ids.squeeze(0), position_ids.squeeze(0), logits_to_keep)
        if logits is not None:
            return Output(logits.unsqueeze(0))
        states = self.embed(input_ids)
        states = self.layers(states, position_embeddings=self.turn(states, position_ids))
        return Output(self.head(self.norm(states[:, logits_to_keep])))

    def in_one_call(self, ids: Tensor, positions: Tensor, kept: Tensor) -> Tensor | None:
        """Logits `[len(kept), vocab_size]` of a flat batch; None if it takes more than a call."""
        attention = self.layers.own_attention
        if attention is None or self.ends is None:
            return None
        return attention.run_pass(self.layers.weights, self.ends, ids, positions, kept)


@torch.inference_mode()
def shorten(network: Any, max_positions: int) -> Counter[str]:
    """Exchanges the model's forward pass if all its layers are one call and it has no other parts
    than those; and if both give the same bits, which anything that happens between the parts would
    change. Positions are below `max_positions`."""
    count = Counter({"short passes": 0, "passes in one call": 0})
    if _parts(network) != _NETWORK_PARTS or _parts(network.model) != _MODEL_PARTS:
        return count
    model = network.model
    stack = model.layers[0].forward
    if not isinstance(stack, LayerStack):
        return count
    short = ShortPass(
        model.embed_tokens.forward,
        model.rotary_emb,
        stack,
        model.norm.forward,
        network.lm_head,
        _ends(network, max_positions),
    )
    if _gives_the_same(short, network):
        if short.ends is not None and not _is_the_same_in_one_call(short, network):
            short = replace(short, ends=None)
        network.forward = short
        count["short passes"] = 1
        count["passes in one call"] = int(short.ends is not None)
    return count


def _ends(network: Any, max_positions: int) -> Ends | None:
    norm, head = network.model.norm.forward, network.lm_head.forward
    embedding = _embedding(network.model.embed_tokens)
    if embedding is None or not isinstance(norm, RmsNorm) or not isinstance(head, Product):
        return None
    panels, num_embeddings = embedding
    tables = _rotation_tables(network.model.rotary_emb, panels.dtype, max_positions)
    if tables is None:
        return None
    return Ends(panels, num_embeddings, *tables, norm.weight, norm.epsilon, head)


def _embedding(module: Any) -> tuple[Tensor, int] | None:
    """Its weight in panels, and how many rows that has; None if it does more than look them up."""
    if type(module) is not nn.Embedding or module.max_norm is not None:
        return None
    owner = getattr(module.forward, "__self__", None)
    if isinstance(owner, PackedWeight):
        return owner.panels, owner.num_outputs
    weight = module.weight.detach()
    if owner is not module or not weight.is_contiguous():
        return None
    return weight.unsqueeze(-1), len(weight)


def _rotation_tables(
    rotation: Any, dtype: torch.dtype, max_positions: int
) -> tuple[Tensor, Tensor] | None:
    """Cosines and sines of all positions; None if those of one depend on the others, as where a
    long prompt is turned in another way than a short one."""

    def turned(positions: Tensor) -> list[Tensor]:
        # Rounded to the model's dtype they could hide a difference.
        return [table.squeeze(0) for table in rotation(torch.empty(0), positions.unsqueeze(0))]

    try:
        [cosine, _] = turned(torch.tensor([0]))
        if 2 * cosine.shape[-1] * dtype.itemsize * max_positions > _LARGEST_TABLE_BYTES:
            return None
        generator = torch.Generator().manual_seed(0)
        everywhere = torch.arange(max_positions)
        anywhere = torch.randint(max_positions, (64,), generator=generator)
        tables = turned(everywhere)
        for positions in (everywhere[:4], everywhere[: max_positions // 2], anywhere):
            for table, rows in zip(tables, turned(positions), strict=True):
                if not _are_close(table[positions], rows):
                    return None
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        log.warning("positions are turned by the model's own code", error=str(error))
        return None
    cosines, sines = (table.to(dtype).contiguous() for table in tables)
    return cosines, sines


def _are_close(one: Tensor, other: Tensor) -> bool:
    """A last bit may depend on a number's place in a vector."""
    same_kind = one.dtype == other.dtype and one.shape == other.shape
    return same_kind and bool(((one - other).abs() <= 2 * torch.finfo(one.dtype).eps).all())


# What a pass is tried with.
_TOKENS: Final = torch.tensor([[0, 1, 2, 3]])
_KEPT: Final = torch.tensor([0, 3])


def _call(positions: Tensor) -> dict[str, Any]:
    return {
        "input_ids": _TOKENS,
        "position_ids": positions,
        "logits_to_keep": _KEPT,
        "use_cache": False,
    }


def _gives_the_same(short: ShortPass, network: Any) -> bool:
    call = _call(torch.tensor([[1, 3, 6, 7]]))
    parts = replace(short, ends=None)
    expected = network(**call).logits
    try:
        return torch.equal(parts(**call).logits, expected)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        log.warning("the model keeps its own forward pass", error=str(error))
        return False


def _is_the_same_in_one_call(short: ShortPass, network: Any) -> bool:
    """As its parts are, on a cache of one block."""
    num_tokens = _TOKENS.numel()
    attention = _throwaway_attention(short.layers, num_tokens)
    call = _call(torch.arange(num_tokens).unsqueeze(0))
    batch = PagedBatch(
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        query_start_loc=torch.tensor([0, num_tokens]),
        seq_lens=torch.tensor([num_tokens]),
        block_size=num_tokens,
    )
    outputs = []
    try:
        with attending_with(network, attention):
            for one in (short, replace(short, ends=None)):
                attention.begin(batch, torch.arange(num_tokens))
                outputs.append(one(**call).logits)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        log.warning("the model's pass is not one call", error=str(error))
        return False
    return torch.equal(*outputs)


def _throwaway_attention(stack: LayerStack, num_slots: int) -> PagedAttention:
    """That of the layers, with a block for so many tokens."""
    caches = []
    for layer in stack.layers:
        num_heads = layer.num_heads + 2 * layer.num_kv_heads
        head_dim = layer.weights.heads.weight.num_outputs // num_heads
        shape = (1, num_slots, layer.num_kv_heads, head_dim)
        dtype = layer.weights.heads.weight.panels.dtype
        caches.append((torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)))
    return PagedAttention(caches, stack.weights.implementation)


def _parts(module: Any) -> set[str]:
    return {name for name, _ in module.named_children()}
