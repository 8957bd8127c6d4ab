"""The work: 64 prompts of 64 to 256 random tokens, outputs of 32 to 96, greedy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from quire.bench.lengths import lengths
from quire.bench.workload import Workload

# The same for every system; sequences are far shorter.
MAX_MODEL_LEN = 1024
MAX_NUM_SEQS = 64
_TOKEN_IDS = range(300, 8000)


def workload(num_requests: int, seed: int = 0) -> Workload:
    return Workload(
        num_requests=num_requests,
        prompt_lengths=lengths("64-256"),
        output_lengths=lengths("32-96"),
        token_ids=_TOKEN_IDS,
        seed=seed,
    )


@dataclass(frozen=True)
class Work:
    """The requests, the same for all systems."""

    prompts: Sequence[list[int]]
    # Tokens to generate for each, ignoring end-of-sequence tokens.
    num_outputs: Sequence[int]
    temperature: float = 0.0

    @classmethod
    def of(cls, load: Workload) -> Self:
        requests = load.requests()
        return cls([r.prompt_token_ids for r in requests], [r.max_tokens for r in requests])

    @classmethod
    def of_json(cls, value: Mapping[str, Any]) -> Self:
        return cls(value["prompts"], value["num_outputs"], value["temperature"])

    @property
    def num_output_tokens(self) -> int:
        return sum(self.num_outputs)
