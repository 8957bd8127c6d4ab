"""Tensors as rows."""

from torch import Tensor


def dense_rows(states: Tensor) -> tuple[Tensor, int]:
    """Rows `[num_rows, dim]` of contiguous numbers, and the distance between them, which does not
    depend on their number. `states` are not empty."""
    dim = states.shape[-1]
    rows = states.reshape(-1, dim)
    if rows.stride(1) != 1 and dim > 1:
        rows = rows.contiguous()
    return rows, dim if len(rows) == 1 else rows.stride(0)
