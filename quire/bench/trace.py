"""One request as its client saw it."""

from dataclasses import dataclass, field
from itertools import pairwise


@dataclass
class Trace:
    """When things happened to a request, in seconds since the load began."""

    num_prompt_tokens: int
    # When it was to be sent, and when it was.
    due_s: float
    sent_s: float = 0.0
    # When messages with tokens came, and how many each of them brought.
    times_s: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    # Empty where the server does not tell them.
    token_ids: list[int] = field(default_factory=list)
    # What the server counted itself, if it did.
    num_counted_tokens: int | None = None
    ended_s: float = 0.0
    # Why it failed.
    error: str | None = None

    @property
    def num_output_tokens(self) -> int:
        return sum(self.counts) if self.num_counted_tokens is None else self.num_counted_tokens

    @property
    def is_complete(self) -> bool:
        return self.error is None

    @property
    def late_s(self) -> float:
        """How much later than due it was sent: the load generator's own fault."""
        return self.sent_s - self.due_s

    @property
    def first_token_s(self) -> float | None:
        """Until the first token; None if none came."""
        return self.times_s[0] - self.due_s if self.times_s else None

    @property
    def gaps_s(self) -> list[float]:
        """Between messages with tokens."""
        return [later - earlier for earlier, later in pairwise(self.times_s)]

    @property
    def per_output_token_s(self) -> float | None:
        """Mean time of a token behind the first; None without one."""
        if not self.times_s or self.num_output_tokens < 2:
            return None
        return (self.times_s[-1] - self.times_s[0]) / (self.num_output_tokens - 1)

    @property
    def latency_s(self) -> float:
        """Until the end."""
        return self.ended_s - self.due_s
