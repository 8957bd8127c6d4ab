"""The sampling parameters of a batch of rows, as tensors."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class SamplingTensors:
    """Sampling parameters, each contiguous `[num_rows]` on the logits' device."""

    temperatures: Tensor  # float32; 0 takes the most likely token
    top_ks: Tensor  # int64; 0 considers all
    top_ps: Tensor  # float32; 1 considers all
    min_ps: Tensor  # float32; 0 considers all
    seeds: Tensor  # int64, used as 64 bits
    positions: Tensor  # int64, of the sampled tokens

    def of(self, rows: Tensor) -> "SamplingTensors":
        """The parameters of the given rows."""
        return SamplingTensors(**{name: column[rows] for name, column in vars(self).items()})
