"""What the steps of workers have yielded: tokens, and accepted drafts."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Self

from quire.internal.v1.operations_pb2 import WorkerStatus


@dataclass(frozen=True)
class DecodeCounts:
    """Totals of some workers, or their increase."""

    num_tokens: int
    # Those without tokens of jumps and without those behind accepted drafts: one for each row and
    # step.
    num_row_steps: int
    # By position behind a row's last token.
    num_draft_tokens: tuple[int, ...]
    num_accepted_tokens: tuple[int, ...]

    @classmethod
    def of(cls, workers: Iterable[WorkerStatus]) -> Self:
        workers = list(workers)
        num_accepted = _added_up(worker.num_accepted_tokens for worker in workers)
        num_tokens = sum(worker.num_sampled_tokens for worker in workers)
        num_forced = sum(worker.num_forced_tokens for worker in workers)
        return cls(
            num_tokens=num_tokens,
            num_row_steps=num_tokens - num_forced - sum(num_accepted),
            num_draft_tokens=_added_up(worker.num_draft_tokens for worker in workers),
            num_accepted_tokens=num_accepted,
        )

    def since(self, before: Self) -> Self:
        """The increase since earlier counts."""
        return type(self)(
            num_tokens=self.num_tokens - before.num_tokens,
            num_row_steps=self.num_row_steps - before.num_row_steps,
            num_draft_tokens=_increase(self.num_draft_tokens, before.num_draft_tokens),
            num_accepted_tokens=_increase(self.num_accepted_tokens, before.num_accepted_tokens),
        )

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens that a row has gained in a step, on average; None before the first."""
        return _share(self.num_tokens, self.num_row_steps)

    @property
    def acceptance(self) -> float | None:
        """Share of the drafts that were accepted; None without drafts."""
        return _share(sum(self.num_accepted_tokens), sum(self.num_draft_tokens))

    @property
    def acceptance_by_position(self) -> list[float]:
        """A draft counts as rejected if the one before it is."""
        pairs = zip_longest(self.num_accepted_tokens, self.num_draft_tokens, fillvalue=0)
        return [_share(accepted, drafted) or 0.0 for accepted, drafted in pairs]


def _added_up(counts: Iterable[Iterable[int]]) -> tuple[int, ...]:
    return tuple(sum(each) for each in zip_longest(*counts, fillvalue=0))


def _increase(now: tuple[int, ...], before: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(one - other for one, other in zip_longest(now, before, fillvalue=0))


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole > 0 else None
