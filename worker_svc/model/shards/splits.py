"""How the tensors of a checkpoint are split over ranks, by their names."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from worker_svc.model.checkpoint import ModelError
from worker_svc.model.quantized.checkpoint_tensors import StoredTensor
from worker_svc.model.shards.shard import Shard


@dataclass(frozen=True)
class Split:
    """A tensor of which each rank has a part, along one dimension."""

    dim: int
    # In units of what: any that the ranks divide, whole key and value heads, or tokens.
    unit: Literal["any", "kv_head", "token"] = "any"
    # Tensors that the checkpoint has one behind another along this dimension.
    joined: int = 1


# Every rank has the whole tensor.
WHOLE: Final = None
# A bias that is added to a sum over the ranks: all but the first rank have zeros.
FIRST_RANK: Final = "first rank"

Rule = Split | Literal["first rank"] | None
# The rules of names, without the prefix that a base model may have. The first match counts.
Rules = tuple[tuple[str, Rule], ...]

_VOCABULARY: Final[Rules] = ((r"(?:.*\.)?(?:embed_tokens|lm_head|wte)\.\w+", Split(0, "token")),)
_REPLICATED: Final[Rules] = (
    (r".*(?:norm|ln_1|ln_2|ln_f|wpe)\w*\.(?:weight|bias)", WHOLE),
    # Of 8-bit caches.
    (r".*\.(?:k_scale|v_scale|kv_scale|[kv]_proj\.output_scale)", WHOLE),
)
_ATTENTION: Final[Rules] = (
    (r".*\.self_attn\.q_proj\.\w+", Split(0)),
    (r".*\.self_attn\.[kv]_proj\.\w+", Split(0, "kv_head")),
    (r".*\.self_attn\.o_proj\.weight", Split(1)),
    (r".*\.self_attn\.o_proj\.bias", FIRST_RANK),
    (r".*\.self_attn\.sinks", Split(0)),
)
_GATED_MLP: Final[Rules] = (
    (r".*\.(?:gate|up)_proj\.\w+", Split(0)),
    (r".*\.down_proj\.weight", Split(1)),
    (r".*\.down_proj\.bias", FIRST_RANK),
)
_COMMON: Final = _VOCABULARY + _REPLICATED + _ATTENTION
DENSE: Final[Rules] = _COMMON + _GATED_MLP
# Norms of heads have weights of their own for each head.
COHERE: Final[Rules] = (
    (r".*\.self_attn\.q_norm\.weight", Split(0)),
    (r".*\.self_attn\.k_norm\.weight", Split(0, "kv_head")),
    *DENSE,
)
# Every rank has all experts, with a part of their inner width.
MIXTRAL: Final[Rules] = (
    *_COMMON,
    (r".*\.experts\.\d+\.w[13]\.weight", Split(0)),
    (r".*\.experts\.\d+\.w2\.weight", Split(1)),
    (r".*\.gate\.weight", WHOLE),
)
QWEN3_MOE: Final[Rules] = (*_COMMON, *_GATED_MLP, (r".*\.mlp\.gate\.weight", WHOLE))
# Gates and values alternate, and weights are stored transposed.
GPT_OSS: Final[Rules] = (
    *_COMMON,
    (r".*\.experts\.gate_up_proj", Split(2)),
    (r".*\.experts\.gate_up_proj_bias", Split(1)),
    (r".*\.experts\.down_proj", Split(1)),
    (r".*\.experts\.down_proj_bias", FIRST_RANK),
    (r".*\.router\.(?:weight|bias)", WHOLE),
)
# Weights are stored transposed.
GPT2: Final[Rules] = (
    *_VOCABULARY,
    *_REPLICATED,
    (r".*\.attn\.c_attn\.weight", Split(1, joined=3)),
    (r".*\.attn\.c_attn\.bias", Split(0, joined=3)),
    (r".*\.mlp\.c_fc\.weight", Split(1)),
    (r".*\.mlp\.c_fc\.bias", Split(0)),
    (r".*\.c_proj\.weight", Split(0)),
    (r".*\.c_proj\.bias", FIRST_RANK),
)

OF_TYPES: Final[Mapping[str, Rules]] = {
    "cohere": COHERE,
    "gpt2": GPT2,
    "gpt_oss": GPT_OSS,
    "mixtral": MIXTRAL,
    "qwen3_moe": QWEN3_MOE,
}

# Constants that older checkpoints have as tensors. transformers computes them, and ignores these.
_COMPUTED: Final = re.compile(r"(?:.*\.)?(?:rotary_emb\.inv_freq|h\.\d+\.attn\.(?:masked_)?bias)")


def is_computed(name: str) -> bool:
    """Whether the network has no such tensor, although checkpoints may have."""
    return _COMPUTED.fullmatch(name) is not None


def rule_of(name: str, rules: Rules) -> Rule:
    """ModelError if no rule has this name."""
    for pattern, rule in rules:
        if re.fullmatch(pattern, name):
            return rule
    raise ModelError(f"--tensor-parallel-size: no split is known of {name}")


def part_of(stored: StoredTensor, rule: Rule, shard: Shard, num_kv_heads: int) -> Tensor:
    """A rank's part of a tensor in a file, of which nothing else is read."""
    if rule is WHOLE:
        # Scales may have no dimension.
        return stored[...]
    if isinstance(rule, str):
        bias = stored[...]
        return bias if shard.is_first else torch.zeros_like(bias)
    size = stored.get_shape()[rule.dim] // rule.joined
    kept = kept_range(size, rule, shard, num_kv_heads)
    parts = [
        _read(stored, rule.dim, range(start + kept.start, start + min(kept.stop, size)))
        for start in range(0, size * rule.joined, size)
    ]
    part = torch.cat(parts, rule.dim) if len(parts) > 1 else parts[0]
    return _padded(part, rule.dim, len(kept) * rule.joined)


def kept_range(size: int, split: Split, shard: Shard, num_kv_heads: int) -> range:
    """What a rank has of `size` along the split's dimension. May go beyond the end of the
    vocabulary."""
    if split.unit == "token":
        return shard.rows(size)
    if split.unit == "kv_head":
        heads, width = shard.kv_heads(num_kv_heads), size // num_kv_heads
        return range(heads.start * width, heads.stop * width)
    return shard.equal_part(size)


def _read(stored: StoredTensor, dim: int, kept: range) -> Tensor:
    """`kept` may be empty, beyond the end."""
    stop = max(kept.start, kept.stop)
    return stored[(slice(None),) * dim + (slice(kept.start, stop),)]


def _padded(part: Tensor, dim: int, size: int) -> Tensor:
    """With zeros up to `size` in this dimension."""
    missing = size - part.shape[dim]
    if not missing:
        return part
    shape = (*part.shape[:dim], missing, *part.shape[dim + 1 :])
    return torch.cat([part, part.new_zeros(shape)], dim)
