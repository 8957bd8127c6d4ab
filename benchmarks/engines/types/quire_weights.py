"""Sizes of Quire's weights and pool in memory, by the type of the weights."""

from benchmarks.engines.models import Shape
from benchmarks.engines.types.variants import BFLOAT16, FLOAT32, INT4, INT8

_BITS = {FLOAT32: 32, BFLOAT16: 16, INT8: 8, INT4: 4}
# Of the output layer, which is tied to the embeddings.
_HEAD_BITS = {FLOAT32: 32, BFLOAT16: 16, INT8: 8, INT4: 8}
# A scale and an offset: of each group of so many inputs in float16 with 4 bits, of each output in
# float32 with 8 bits.
_GROUP = 128


def quire_weight_bytes(shape: Shape, kind: str) -> int:
    """Return the bytes that a decoding step reads of the weights, without those of the norms."""
    layers = sum(_bytes(*product, _BITS[kind]) for product in shape.products)
    head = _bytes(shape.hidden_size, shape.vocab_size, _HEAD_BITS[kind])
    return shape.num_hidden_layers * layers + head


def _bytes(num_inputs: int, num_outputs: int, bits: int) -> int:
    scale_bytes = {8: 2 * 4, 4: 2 * 2 * num_inputs // _GROUP}.get(bits, 0)
    return num_outputs * (num_inputs * bits // 8 + scale_bytes)


def pool_bytes(shape: Shape, kind: str) -> int:
    """Return the size of the pool, whose type is that of the activations."""
    return shape.kv_cache_mib * 2**20 * (2 if kind == FLOAT32 else 1)
