"""What the scheduler has to know of the model."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """Model properties that all workers must share."""

    fingerprint: bytes
    block_size: int
    max_model_len: int
    kv_cache_dtype: str
