"""The models: Qwen3 architecture, random weights, small enough for any machine."""

from dataclasses import dataclass, replace
from typing import Literal

_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Dimensions of a model. Weights are drawn from seed 0; embeddings are tied."""

    name: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    # Of the weights.
    dtype: Literal["float32", "bfloat16"]
    # Room for all sequences of the work at once, in the weights' type.
    kv_cache_mib: int

    @property
    def products(self) -> list[tuple[int, int]]:
        """Input and output features of one layer's matrix products."""
        queries = self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        hidden, inner = self.hidden_size, self.intermediate_size
        return [
            (hidden, queries),
            (hidden, keys),
            (hidden, keys),
            (queries, hidden),
            (hidden, inner),
            (hidden, inner),
            (inner, hidden),
        ]

    @property
    def num_parameters(self) -> int:
        """Number of parameters, without those of the norms."""
        layer = sum(inputs * outputs for inputs, outputs in self.products)
        return self.num_hidden_layers * layer + self.vocab_size * self.hidden_size

    @property
    def size(self) -> str:
        """Number of parameters as text, rounded to 10 million."""
        return f"{10 * round(self.num_parameters / 1e7)} million parameters"

    @property
    def weight_bytes(self) -> int:
        return self.num_parameters * _BYTES[self.dtype]

    @property
    def kv_cache_bytes(self) -> int:
        return self.kv_cache_mib * 2**20

    def flops(self, num_tokens: int, num_sampled: int) -> int:
        """Return the operations of a step's matrix products, without attention."""
        layer = sum(inputs * outputs for inputs, outputs in self.products)
        head = self.vocab_size * self.hidden_size
        return 2 * (num_tokens * self.num_hidden_layers * layer + num_sampled * head)


@dataclass(frozen=True, kw_only=True)
class BenchModel(Shape):
    """A model for the comparison in float32."""

    # For latencies, per second: about 60 % of the capacity of two slow cores.
    request_rate: float


SMALL = BenchModel(
    name="30m",
    hidden_size=512,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    intermediate_size=1536,
    vocab_size=8192,
    max_position_embeddings=4096,
    dtype="float32",
    request_rate=2.5,
    kv_cache_mib=512,
)
LARGE = BenchModel(
    name="110m",
    hidden_size=768,
    num_hidden_layers=12,
    num_attention_heads=12,
    num_key_value_heads=4,
    head_dim=64,
    intermediate_size=2304,
    vocab_size=32768,
    max_position_embeddings=4096,
    dtype="float32",
    request_rate=0.7,
    kv_cache_mib=1024,
)
# The shape of Qwen3-0.6B, for the comparison of weights' types.
TYPED = Shape(
    name="0.6b",
    hidden_size=1024,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=3072,
    vocab_size=151_936,
    max_position_embeddings=4096,
    dtype="bfloat16",
    kv_cache_mib=1024,
)
# The same model with long prompts.
TYPED_LONG = replace(TYPED, name="0.6b-long", kv_cache_mib=2048)
MODELS = {model.name: model for model in (SMALL, LARGE)}
SHAPES: dict[str, Shape] = {**MODELS, TYPED.name: TYPED, TYPED_LONG.name: TYPED_LONG}
# Version of the way the weights are drawn. Increment it on a change, so that models are remade.
RECIPE = "1"
