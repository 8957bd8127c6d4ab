"""Measurements of one request, taken by its client."""

from dataclasses import dataclass, field
from itertools import pairwise


@dataclass
class RequestTimings:
    """Events of a request, in seconds since the load began."""

    num_prompt_tokens: int
    # The arrival time, and when the request was sent.
    due_s: float
    sent_s: float = 0.0
    # When messages with tokens were received, and the number of tokens of each.
    times_s: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    # Empty if the server does not return them.
    token_ids: list[int] = field(default_factory=list)
    # The server's own count of output tokens.
    num_counted_tokens: int | None = None
    ended_s: float = 0.0
    # The cause of a failure.
    error: str | None = None

    @property
    def num_output_tokens(self) -> int:
        return sum(self.counts) if self.num_counted_tokens is None else self.num_counted_tokens

    @property
    def is_complete(self) -> bool:
        return self.error is None

    @property
    def late_s(self) -> float:
        """Delay from the arrival to the sending, caused by the load generator."""
        return self.sent_s - self.due_s

    @property
    def first_token_s(self) -> float | None:
        """Time to first token; None without one."""
        return self.times_s[0] - self.due_s if self.times_s else None

    @property
    def gaps_s(self) -> list[float]:
        """Inter-token latencies: the times between messages with tokens."""
        return [later - earlier for earlier, later in pairwise(self.times_s)]

    @property
    def per_output_token_s(self) -> float | None:
        """Time per output token: the mean of those after the first; None if there are none."""
        if not self.times_s or self.num_output_tokens < 2:
            return None
        return (self.times_s[-1] - self.times_s[0]) / (self.num_output_tokens - 1)

    @property
    def latency_s(self) -> float:
        """End-to-end latency."""
        return self.ended_s - self.due_s
