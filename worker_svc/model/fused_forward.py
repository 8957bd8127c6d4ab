"""The forward pass of a model whose layers run in one call, without the masks and caches that
transformers builds in every step, and with the last norm only of tokens whose logits are needed.
With a plain embedding, norm and head the whole pass is one call."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import structlog
import torch
from torch import Tensor, nn

from kernels.attention import PagedBatch
from kernels.decoder import EmbeddingAndHead
from kernels.linear import PackedLinear, PackedWeight
from worker_svc.model.attention import temporary_attention
from worker_svc.model.decoder_layers import LayerStack
from worker_svc.model.elementwise_fusion import RmsNorm
from worker_svc.model.paged_attention import PagedAttention

log = structlog.get_logger()

_NETWORK_PARTS: Final = {"model", "lm_head"}
_MODEL_PARTS: Final = {"embed_tokens", "layers", "norm", "rotary_emb"}
# Of cosines and sines: a larger table would be significant beside a small model's weights.
_LARGEST_TABLE_BYTES: Final = 64 * 2**20


@dataclass(frozen=True)
class Output:
    """The part of transformers' output that is used."""

    logits: Tensor


@dataclass(frozen=True)
class FusedForward:
    """The parts of such a model, in order."""

    embed: Callable[[Tensor], Tensor]
    rotary_emb: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    layers: LayerStack
    norm: Callable[[Tensor], Tensor]
    lm_head: Callable[[Tensor], Tensor]
    embedding_and_head: EmbeddingAndHead | None  # the same parts for one call, if possible

    def __call__(
        self,
        *,
        input_ids: Tensor,
        position_ids: Tensor,
        logits_to_keep: Tensor,
        use_cache: Literal[False],
    ) -> Output:
        """Take the arguments of `LoadedModel.logits`."""
        logits = self.in_one_call(input_ids.squeeze(0), position_ids.squeeze(0), logits_to_keep)
        if logits is not None:
            return Output(logits.unsqueeze(0))
        return Output(self.head(self.states(input_ids, position_ids)[:, logits_to_keep]))

    def states(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Hidden states after the layers `[1, num_tokens, hidden_size]`."""
        states = self.embed(input_ids)
        return self.layers(states, position_embeddings=self.rotary_emb(states, position_ids))

    def head(self, states: Tensor) -> Tensor:
        """Logits of such states."""
        return self.lm_head(self.norm(states))

    def in_one_call(
        self, ids: Tensor, positions: Tensor, logits_indices: Tensor, out: Tensor | None = None
    ) -> Tensor | None:
        """Float32 logits of the tokens `logits_indices` of a flat batch, in `out` if given; None if
        one call is impossible."""
        attention = self.layers.attention_for(len(ids))
        if attention is None or self.embedding_and_head is None:
            return None
        return attention.run_forward(
            self.layers.weights,
            self.embedding_and_head,
            ids,
            positions,
            logits_indices,
            self.layers.exchange,
            out,
        )


@torch.inference_mode()
def fuse_forward(network: Any, max_positions: int) -> Counter[str]:
    """Replace the model's forward pass; return counts. Positions are below `max_positions`. The
    layers have to be one call, the other parts those of `FusedForward`, and the output bitwise the
    same, so that a model with other work between its parts is left alone."""
    count = Counter({"fused passes": 0, "passes in one call": 0})
    if _parts(network) != _NETWORK_PARTS or _parts(network.model) != _MODEL_PARTS:
        return count
    model = network.model
    stack = model.layers[0].forward
    if not isinstance(stack, LayerStack):
        return count
    fused = FusedForward(
        model.embed_tokens.forward,
        model.rotary_emb,
        stack,
        model.norm.forward,
        network.lm_head,
        _embedding_and_head(network, max_positions),
    )
    if _matches(fused, network):
        if fused.embedding_and_head is not None and not _matches_in_one_call(fused, network):
            fused = replace(fused, embedding_and_head=None)
        network.forward = fused
        count["fused passes"] = 1
        count["passes in one call"] = int(fused.embedding_and_head is not None)
    return count


def _embedding_and_head(network: Any, max_positions: int) -> EmbeddingAndHead | None:
    norm, head = network.model.norm.forward, network.lm_head.forward
    embedding = _embedding(network.model.embed_tokens)
    if embedding is None or not isinstance(norm, RmsNorm) or not isinstance(head, PackedLinear):
        return None
    panels, num_embeddings = embedding
    tables = _rope_tables(network.model.rotary_emb, head.weight.dtype, max_positions)
    if tables is None:
        return None
    return EmbeddingAndHead(panels, num_embeddings, *tables, norm.weight, norm.epsilon, head)


def _embedding(module: Any) -> tuple[Tensor, int] | None:
    """Its weight in panels and the number of rows; None if it is not a plain lookup."""
    if type(module) is not nn.Embedding or module.max_norm is not None:
        return None
    owner = getattr(module.forward, "__self__", None)
    if isinstance(owner, PackedWeight):
        return owner.panels, owner.num_outputs
    weight = module.weight.detach()
    if owner is not module or not weight.is_contiguous():
        return None
    return weight.unsqueeze(-1), len(weight)


def _rope_tables(
    rotary_emb: Any, dtype: torch.dtype, max_positions: int
) -> tuple[Tensor, Tensor] | None:
    """Cosines and sines of all positions. None if those of one position depend on the others of
    the batch, as in models that rotate long prompts differently."""

    def rotated(positions: Tensor) -> list[Tensor]:
        # In float32, because rounding to the model's dtype could hide a difference.
        return [table.squeeze(0) for table in rotary_emb(torch.empty(0), positions.unsqueeze(0))]

    try:
        [cosine, _] = rotated(torch.tensor([0]))
        if 2 * cosine.shape[-1] * dtype.itemsize * max_positions > _LARGEST_TABLE_BYTES:
            return None
        generator = torch.Generator().manual_seed(0)
        everywhere = torch.arange(max_positions)
        anywhere = torch.randint(max_positions, (64,), generator=generator)
        tables = rotated(everywhere)
        for positions in (everywhere[:4], everywhere[: max_positions // 2], anywhere):
            for table, rows in zip(tables, rotated(positions), strict=True):
                if not _are_close(table[positions], rows):
                    return None
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        log.warning("rotary embeddings keep the model's own code", reason=str(error))
        return None
    cosines, sines = (table.to(dtype).contiguous() for table in tables)
    return cosines, sines


def _are_close(one: Tensor, other: Tensor) -> bool:
    """Whether all but the last bits agree: these may depend on a number's index in a vector."""
    same_kind = one.dtype == other.dtype and one.shape == other.shape
    return same_kind and bool(((one - other).abs() <= 2 * torch.finfo(one.dtype).eps).all())


# Inputs of the passes that are compared.
_TOKENS: Final = torch.tensor([[0, 1, 2, 3]])
_KEPT: Final = torch.tensor([0, 3])


def _call(positions: Tensor) -> dict[str, Any]:
    return {
        "input_ids": _TOKENS,
        "position_ids": positions,
        "logits_to_keep": _KEPT,
        "use_cache": False,
    }


def _matches(fused: FusedForward, network: Any) -> bool:
    call = _call(torch.tensor([[1, 3, 6, 7]]))
    parts = replace(fused, embedding_and_head=None)
    expected = network(**call).logits
    try:
        return torch.equal(parts(**call).logits, expected)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        log.warning("the model keeps its own forward pass", reason=str(error))
        return False


def _matches_in_one_call(fused: FusedForward, network: Any) -> bool:
    """Whether one call gives what the parts give, on a cache of one block."""
    num_tokens = _TOKENS.numel()
    attention = _scratch_attention(fused.layers, num_tokens)
    call = _call(torch.arange(num_tokens).unsqueeze(0))
    batch = PagedBatch(
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        query_start_loc=torch.tensor([0, num_tokens]),
        seq_lens=torch.tensor([num_tokens]),
        block_size=num_tokens,
    )
    outputs = []
    try:
        with temporary_attention(network, attention):
            for one in (fused, replace(fused, embedding_and_head=None)):
                attention.set_batch(batch, torch.arange(num_tokens))
                outputs.append(one(**call).logits.float())
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        log.warning("the model's forward pass is not one call", reason=str(error))
        return False
    return torch.equal(*outputs)


def _scratch_attention(stack: LayerStack, num_slots: int) -> PagedAttention:
    """Paged attention for these layers, on one block of `num_slots`."""
    caches = []
    for layer in stack.layers:
        num_heads = layer.num_heads + 2 * layer.num_kv_heads
        head_dim = layer.weights.qkv_proj.weight.num_outputs // num_heads
        shape = (1, num_slots, layer.num_kv_heads, head_dim)
        dtype = layer.weights.qkv_proj.weight.dtype
        caches.append((torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)))
    return PagedAttention(caches, stack.weights.implementation)


def _parts(module: Any) -> set[str]:
    return {name for name, _ in module.named_children()}
