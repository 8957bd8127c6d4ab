"""Where the quantised weights of a model's layers come from."""

from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from kernels.linear import WEIGHT_DTYPES
from kernels.quantized import Bits, QuantizedWeight, quantize

# Weights are made one at a time, when they are packed, so that memory holds few of them.
WeightSource = Callable[[], QuantizedWeight]
WeightSources = dict[nn.Module, WeightSource]


@dataclass(frozen=True)
class RoundedWeight:
    """The weight of a layer in fewer bits."""

    layer: nn.Linear
    bits: Bits

    def __call__(self) -> QuantizedWeight:
        return quantize(self.layer.weight.detach(), self.bits)


@dataclass(frozen=True)
class RoundedInputs:
    """A weight whose products may round their inputs to 8 bits."""

    source: WeightSource

    def __call__(self) -> QuantizedWeight:
        return replace(self.source(), int8_activations=True)


def rounded_weights(
    network: Any, quantization: str, kept: Container[nn.Module] = ()
) -> WeightSources:
    """The linear layers of a model in `int8` or `int4`, without those `kept`. The output layer,
    and so the embedding that is tied to it, has 8 bits in both."""
    head = network.get_output_embeddings()
    return {
        layer: RoundedWeight(layer, 8 if quantization == "int8" or layer is head else 4)
        for layer in network.modules()
        if type(layer) is nn.Linear and layer not in kept and layer.weight.dtype in WEIGHT_DTYPES
    }
