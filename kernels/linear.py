"""Products of activations with weights that were laid out for them once."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.choice import Implementation

WEIGHT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class PackedWeight:
    """A weight `[num_outputs, num_inputs]` whose rows stand side by side in panels.

    A kernel reads a panel from its begin to its end: for each input, the weights of the outputs
    that one step of it computes. The layout is that of one implementation.
    """

    panels: Tensor  # [ceil(num_outputs / width), num_inputs, width], zeros beyond the last output
    num_outputs: int
    implementation: Implementation

    @classmethod
    def of(cls, weight: Tensor, implementation: Implementation) -> Self:
        """`weight` is of one of WEIGHT_DTYPES; it is copied."""
        width = torch.ops.quire.panel_width(implementation.isa)
        num_outputs, num_inputs = weight.shape
        padded = pad(weight, (0, 0, 0, -num_outputs % width))
        panels = padded.view(-1, width, num_inputs).transpose(1, 2).contiguous()
        return cls(panels, num_outputs, implementation)

    def rows(self, indices: Tensor) -> Tensor:
        """The weight's rows: `[*indices.shape, num_inputs]`."""
        width = self.panels.shape[2]
        return self.panels[indices // width, :, indices % width]


def linear(input: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """`input [..., num_inputs]` times the weight, transposed, plus the float32 `bias`.

    Sums are in float32 and rounded once, to the dtype of the input. A row's result does not depend
    on the rows beside it.
    """
    out: Tensor = torch.ops.quire.linear(
        input, weight.panels, weight.num_outputs, bias, weight.implementation.isa
    )
    return out


def linear_reference(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The obvious twin of `linear`, of the weight as it was."""
    out = input.float() @ weight.float().T
    return (out if bias is None else out + bias).to(input.dtype)
