"""The config and the class of a shard: those of a smaller model."""

from copy import deepcopy
from typing import Any, Final

from transformers import GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from worker_svc.errors import WrongSettingError
from worker_svc.model.shards import splits
from worker_svc.model.shards.shard import Shard

_SETTING: Final = "--tensor-parallel-size / QUIRE_WORKER_TENSOR_PARALLEL_SIZE"
# The plan of transformers for models whose layers are attention and a gated MLP.
_DENSE_PLAN: Final = {
    **{f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
    "layers.*.self_attn.o_proj": "rowwise",
    **{f"layers.*.mlp.{name}_proj": "colwise" for name in ("gate", "up")},
    "layers.*.mlp.down_proj": "rowwise",
}
# Types that have this plan, but tensors of other names, of widths that do not follow that of heads,
# or heads that differ from layer to layer.
_OTHERS: Final = frozenset({"exaone", "gemma4_unified_text", "helium"})
# Beside it: norms of single heads.
_HEAD_NORMS: Final = {f"layers.*.self_attn.{name}_norm" for name in "qk"}


def rules_of(config: Any) -> splits.Rules:
    """How the tensors of such a model are split. WrongSettingError, which names the model's type,
    if that is not known."""
    kind = config.model_type
    if kind in splits.OF_TYPES:
        return splits.OF_TYPES[kind]
    plan = dict(getattr(config, "base_model_tp_plan", None) or {})
    if kind not in _OTHERS and config.get_text_config() is config and _is_dense(plan):
        return splits.DENSE
    raise WrongSettingError(
        "--tensor-parallel-size, --pipeline-parallel-size: no split is known of models of type "
        f"{kind}, but of those with the plan of Llama (as Qwen3 and Gemma 2) and of the types "
        f"{', '.join(splits.OF_TYPES)}; leave both at 1"
    )


def _is_dense(plan: dict[str, str]) -> bool:
    others = plan.items() - _DENSE_PLAN.items()
    return plan.items() >= _DENSE_PLAN.items() and {name for name, _ in others} <= _HEAD_NORMS


def narrow_config(config: Any, shard: Shard) -> Any:
    """The config of a shard. WrongSettingError if the ranks do not divide the model, or if it
    cannot be split."""
    # Others may have a width per layer.
    rules_of(config)
    narrow = deepcopy(config)
    num_heads, num_kv_heads = num_heads_of(config)
    _require_divisible("query heads", num_heads, shard)
    if num_kv_heads % shard.count and shard.count % num_kv_heads:
        raise WrongSettingError(
            f"{_SETTING}: {shard.count} ranks and {num_kv_heads} key and value heads, of which "
            f"neither divides the other; set it to a divisor or a multiple of {num_kv_heads}"
        )
    for name in ("intermediate_size", "moe_intermediate_size", "n_inner"):
        if (width := getattr(config, name, None)) is not None:
            _require_divisible(name, width, shard)
            setattr(narrow, name, width // shard.count)
    narrow.vocab_size = len(shard.rows(config.vocab_size))
    # An index beyond the shard's vocabulary would be refused, and padding has no use here.
    narrow.pad_token_id = None
    if config.model_type == "gpt2":
        _narrow_gpt2(narrow, config, shard)
        return narrow
    narrow.head_dim = head_dim_of(config)
    narrow.num_attention_heads = num_heads // shard.count
    narrow.num_key_value_heads = len(shard.kv_heads(num_kv_heads))
    return narrow


def num_heads_of(config: Any) -> tuple[int, int]:
    """Query heads, and key and value heads."""
    num_heads = config.num_attention_heads
    return num_heads, getattr(config, "num_key_value_heads", None) or num_heads


def head_dim_of(config: Any) -> int:
    dim: int | None = getattr(config, "head_dim", None)
    return dim or config.hidden_size // config.num_attention_heads


def shard_class(network_class: Any, shard: Shard) -> Any:
    """The class of a shard's network. That of GPT-2 derives the width of attention from that of
    hidden states, so its attention is replaced."""
    if network_class is not GPT2LMHeadModel:
        return network_class

    def __init__(self: Any, config: Any) -> None:  # noqa: N807
        network_class.__init__(self, config)
        for block in self.transformer.h:
            _narrow_attention(block.attn, shard)

    return type(network_class.__name__, (network_class,), {"__init__": __init__})


def _narrow_gpt2(narrow: Any, config: Any, shard: Shard) -> None:
    """The number of heads stays, because with it the width of a head would change."""
    if config.n_inner is None:
        _require_divisible("inner width", 4 * config.n_embd, shard)
        narrow.n_inner = 4 * config.n_embd // shard.count


def _narrow_attention(attention: Any, shard: Shard) -> None:
    hidden_size = attention.embed_dim
    width = hidden_size // shard.count
    attention.num_heads //= shard.count
    attention.split_size = width
    attention.c_attn = Conv1D(3 * width, hidden_size)
    attention.c_proj = Conv1D(hidden_size, width)


def _require_divisible(what: str, size: int, shard: Shard) -> None:
    if size % shard.count:
        raise WrongSettingError(
            f"{_SETTING}: {shard.count} does not divide the model's {size} {what}; set it to a "
            f"divisor of {size}"
        )
