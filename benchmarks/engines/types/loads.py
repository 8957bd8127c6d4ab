"""The work: prompts of equal length and random tokens, with outputs of equal length."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from quire.bench.lengths import lengths
from quire.bench.workload import Workload

STREAM, WARM = "stream", "warm"
_NUM_WARMUPS = 2


@dataclass(frozen=True)
class Loads:
    """Numbers of requests and tokens. Every round has the same requests."""

    num_prompt_tokens: int
    num_output_tokens: int
    # By number of requests that are sent at once: how often, one after the other.
    at_once: Mapping[int, int]
    # Streams, one after the other.
    num_streams: int
    # The same for every engine; a sequence has fewer tokens.
    max_model_len: int = 1024
    max_num_seqs: int = 32
    # Whether contexts are so short that a step of one stream reads little besides the weights.
    is_short: bool = True

    @property
    def names(self) -> list[str]:
        """Commands of the processes that run the loads."""
        return [*map(str, self.at_once), STREAM]

    @property
    def num_tokens(self) -> int:
        """Tokens of a request, prompt and output."""
        return self.num_prompt_tokens + self.num_output_tokens

    def prompts(self, vocab_size: int) -> dict[str, list[list[list[int]]]]:
        """Return the prompts of each load, and of a warm-up: for each repetition those of its
        requests."""
        shapes = {str(n): [n] * times for n, times in self.at_once.items()}
        shapes |= {STREAM: [1] * self.num_streams, WARM: [_NUM_WARMUPS]}
        drawn = iter(self._drawn(sum(map(sum, shapes.values())), vocab_size))
        return {
            name: [[next(drawn) for _ in range(count)] for count in counts]
            for name, counts in shapes.items()
        }

    def _drawn(self, num_prompts: int, vocab_size: int) -> list[list[int]]:
        workload = Workload(
            num_requests=num_prompts,
            prompt_lengths=lengths(str(self.num_prompt_tokens)),
            output_lengths=lengths(str(self.num_output_tokens)),
            token_ids=range(vocab_size),
        )
        return [request.prompt_token_ids for request in workload.requests()]


FULL = Loads(160, 32, {1: 4, 8: 1, 32: 1}, 4)
QUICK = Loads(32, 8, {1: 1, 8: 1}, 1)
LONG = Loads(3072, 64, {1: 1, 4: 1}, 2, max_model_len=4096, max_num_seqs=4, is_short=False)
QUICK_LONG = replace(LONG, num_output_tokens=16, at_once={1: 1}, num_streams=1)
