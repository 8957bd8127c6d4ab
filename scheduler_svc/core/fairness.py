"""Shares the service between principals: the Virtual Token Counter, with weights.

Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024. A counter adds up what a
principal was served, divided by its weight. New sequences of the principal with the lowest counter
are dispatched first. A counter that was idle is lifted, so that idle time earns no credit.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from scheduler_svc.core.sequence import Sequence

# The paper's weights of its cost function. A prompt's cost does not depend on cache hits: the share
# of a principal would otherwise depend on what others have cached.
INPUT_TOKEN_COST = 1
OUTPUT_TOKEN_COST = 2


@dataclass(slots=True)
class Share:
    """What one principal was served."""

    weight: float = 1.0
    # Cost of the service, divided by the weight.
    counter: float = 0.0
    # Output tokens whose cost is not in the counter yet.
    num_new_tokens: int = 0
    # The part of the counter that was not served by this leader.
    lifted: float = 0.0

    @property
    def served(self) -> float:
        """What this leader has charged."""
        return self.charged - self.lifted

    def lift(self, cost: float) -> None:
        """Raise the counter for what this leader has not served."""
        self.counter += cost
        self.lifted += cost

    @property
    def charged(self) -> float:
        """The counter with all output."""
        return self.counter + OUTPUT_TOKEN_COST * self.num_new_tokens / self.weight


@dataclass(frozen=True, slots=True)
class ShareState:
    """A share as the next leader finds it."""

    weight: float
    counter: float


class FairShares:
    """The shares of all principals of this term.

    A prompt is charged when it is dispatched, and refunded if it returns to the queue before its
    admission. Output is charged in `apply_output` only, so that the order of the queue does not
    change during a dispatch. What is recomputed after a preemption or a loss is not charged again.
    """

    def __init__(self) -> None:
        self._shares: dict[str, Share] = {}
        # The principal whose new sequence was dispatched last.
        self.last_served: str | None = None

    @property
    def has_several(self) -> bool:
        """Whether there is more than one principal, so that the counters matter."""
        return len(self._shares) > 1

    @property
    def has_tenants(self) -> bool:
        """Whether there is a principal of an API key; calls without a key have an empty one."""
        return any(self._shares)

    def of(self, principal: str) -> Share:
        """The share of a principal; a new one if it is not known."""
        share = self._shares.get(principal)
        if share is None:
            share = self._shares[principal] = Share()
        return share

    def prompt_cost(self, sequence: Sequence) -> float:
        """What the dispatch of a sequence adds to its principal's counter. Siblings share a prompt;
        one with precedence was charged before."""
        if sequence.has_precedence or sequence.choice or sequence.group.prompt_charge:
            return 0.0
        num_tokens = sequence.num_prompt_tokens
        return INPUT_TOKEN_COST * num_tokens / self.of(sequence.group.key.principal).weight

    def charge_prompt(self, sequence: Sequence) -> None:
        """Charge the prompt of a sequence that is dispatched."""
        if cost := self.prompt_cost(sequence):
            sequence.group.prompt_charge = cost
            self.of(sequence.group.key.principal).counter += cost

    def refund_prompt(self, sequence: Sequence) -> bool:
        """Undo the charge of a sequence that was dispatched and not admitted; whether there was
        one."""
        group = sequence.group
        was_admitted = sequence.has_precedence or sequence.num_cached_tokens is not None
        if was_admitted or sequence.choice or not group.prompt_charge:
            return False
        self.of(group.key.principal).counter -= group.prompt_charge
        group.prompt_charge = 0.0
        return True

    def count_output(self, sequences: Iterable[Sequence]) -> Mapping[str, int]:
        """Count the output of these sequences since the last count; return it by principal."""
        counts: Counter[str] = Counter()
        for sequence in sequences:
            num_tokens = sequence.num_served_tokens
            # Negative after a rewind: the tokens sampled again were counted before.
            if (num_new := num_tokens - sequence.num_counted_tokens) > 0:
                sequence.num_counted_tokens = num_tokens
                counts[sequence.group.key.principal] += num_new
        for principal, count in counts.items():
            self.of(principal).num_new_tokens += count
        return counts

    def apply_output(self) -> None:
        """Charge the output that was counted."""
        for share in self._shares.values():
            share.counter = share.charged
            share.num_new_tokens = 0

    def lift(self, principal: str, least: float) -> None:
        """Raise the counter of a principal that was idle to at least this."""
        share = self.of(principal)
        share.lift(max(0.0, least - share.counter))

    def served(self, principal: str) -> float:
        """What this leader has charged a principal."""
        share = self._shares.get(principal)
        return share.served if share else 0.0

    def add_served(self, principal: str, cost: float) -> None:
        """Charge a principal, if it is known, what another shard has served it."""
        if share := self._shares.get(principal):
            share.lift(cost)

    def export(self, charged_again: Iterable[Sequence]) -> dict[str, ShareState]:
        """The shares of all principals, without the prompts of `charged_again`, which the next
        leader queues and charges again."""
        refunds: dict[str, float] = defaultdict(float)
        for sequence in charged_again:
            if not sequence.choice:
                refunds[sequence.group.key.principal] += sequence.group.prompt_charge
        return {
            principal: ShareState(share.weight, share.charged - refunds[principal])
            for principal, share in self._shares.items()
        }

    def restore(self, states: Mapping[str, ShareState], last_served: str | None) -> None:
        """Continue with the shares that another leader had. A principal that it did not know is
        treated as one that was idle."""
        for principal, state in states.items():
            share = self.of(principal)
            share.weight, share.counter, share.lifted = state.weight, state.counter, state.counter
        if last_served is not None:
            self.last_served = last_served
            for principal in self._shares.keys() - states.keys():
                self.lift(principal, states[last_served].counter)
