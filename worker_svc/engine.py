"""What serves plans, whatever stands behind it."""

from dataclasses import dataclass

from worker_svc.step_runner import StepRunner


@dataclass(frozen=True)
class Identity:
    """What a worker tells of itself; fixed once its model is loaded."""

    model_fingerprint: bytes
    block_size: int
    num_blocks: int  # the null block included
    num_host_blocks: int
    kv_cache_dtype: str
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int


@dataclass(frozen=True)
class Engine:
    """What runs the plans, and what it is."""

    runner: StepRunner
    identity: Identity
