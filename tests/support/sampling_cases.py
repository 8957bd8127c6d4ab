"""Parameters of rows that sample, and which of their draws rounding cannot change."""

import torch
from torch import Tensor

from kernels.sampling import SamplingTensors, gumbel_noise, keep_most_likely

# Of the sums that decide a draw: what rounding may change.
_MARGIN = 1e-5
_DTYPES = {
    "temperatures": torch.float32,
    "top_ks": torch.int64,
    "top_ps": torch.float32,
    "min_ps": torch.float32,
    "seeds": torch.int64,
    "positions": torch.int64,
}
_DEFAULTS = {
    "temperatures": 1.0,
    "top_ks": 0,
    "top_ps": 1.0,
    "min_ps": 0.0,
    "seeds": 0,
    "positions": 0,
}


def params(num_rows: int, **changes: object) -> SamplingTensors:
    """A parameter may be one value for all rows."""
    return SamplingTensors(
        **{
            name: torch.as_tensor(value, dtype=_DTYPES[name]).expand(num_rows).contiguous()
            for name, value in {**_DEFAULTS, **changes}.items()
        }
    )


def mixed_params(num_rows: int) -> SamplingTensors:
    """All filters, alone and together, beside rows without any and greedy ones."""
    rows = torch.arange(num_rows)
    return SamplingTensors(
        temperatures=torch.linspace(0, 2, num_rows),
        top_ks=rows % 5 * 40,
        top_ps=torch.where(rows % 3 > 0, torch.linspace(0.1, 1, num_rows), 1.0),
        min_ps=torch.where(rows % 4 == 1, 0.05, 0.0),
        seeds=rows * 0x123456789ABCDEF - 5,
        positions=rows * 3,
    )


def has_margin(logits: Tensor, drawing: SamplingTensors) -> Tensor:
    """Rows whose choice rounding cannot change: the best two sums, and what the filters leave."""
    peaks = logits.amax(-1, keepdim=True)
    scaled = (logits - peaks) / drawing.temperatures.clamp(min=1e-9).unsqueeze(1)
    left = keep_most_likely(scaled, drawing)
    scores = left + gumbel_noise(drawing.seeds, drawing.positions, logits.shape[1])
    best = scores.topk(2).values
    clear = (best[:, 0] - best[:, 1] > _MARGIN) | (drawing.temperatures == 0)
    for shift in (-_MARGIN, _MARGIN):
        shifted = SamplingTensors(
            drawing.temperatures,
            drawing.top_ks,
            torch.where(drawing.top_ps < 1, drawing.top_ps + shift, 1.0),
            (drawing.min_ps + shift).clamp(0, 1),
            drawing.seeds,
            drawing.positions,
        )
        clear &= (keep_most_likely(scaled, shifted) == left).all(-1)
    return clear
