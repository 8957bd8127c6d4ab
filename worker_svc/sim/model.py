"""What a simulated worker is, and how long its steps take."""

from dataclasses import dataclass

from worker_svc.engine import Identity
from worker_svc.inputs import StepInputs


@dataclass(frozen=True, kw_only=True)
class SimModel:
    """The geometry of a worker, and a linear model of a step's time."""

    vocab_size: int = 32000
    max_model_len: int = 4096
    block_size: int = 16
    num_blocks: int = 4096  # the null block included
    num_host_blocks: int = 0
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    step_ms: float = 0.0  # of every forward pass
    token_us: float = 0.0  # more for each scheduled token
    context_ns: float = 0.0  # more for each token attended to

    @property
    def identity(self) -> Identity:
        """Workers of equal vocabulary and length are of one model, whatever their pools."""
        fingerprint = f"sim vocab_size={self.vocab_size} max_model_len={self.max_model_len}"
        return Identity(
            model_fingerprint=fingerprint.encode(),
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            num_host_blocks=self.num_host_blocks,
            kv_cache_dtype="sim",
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=self.max_num_batched_tokens,
        )

    def step_ns(self, inputs: StepInputs) -> int:
        """Nanoseconds of a whole step; 0 without a scheduled token."""
        if not inputs.num_tokens:
            return 0
        context = self.context_ns * float(inputs.seq_lens.sum())
        return int(self.step_ms * 1e6 + self.token_us * 1e3 * inputs.num_tokens + context)
