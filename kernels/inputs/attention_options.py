"""The options of `kernels.attention.paged_attention`, for its implementations."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AttentionOptions:
    """The features of one model's attention, as `paged_attention` defines them."""

    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0
    partition_keys: int | None = None
