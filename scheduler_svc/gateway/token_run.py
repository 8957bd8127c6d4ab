"""Joins the tokens that the same choices get in consecutive steps, without looking at each."""

from collections.abc import Callable
from itertools import chain
from typing import Self

from scheduler_svc.core.request import Delivery
from scheduler_svc.core.sequence import Group


class BufferedRequest:
    """A request whose tokens are buffered."""

    __slots__ = ("group", "next_indices", "run")

    def __init__(self, group: Group, next_indices: list[int]) -> None:
        self.group = group
        # By choice, the index of the next token to send; of a choice in a run, when this began.
        self.next_indices = next_indices
        self.run: TokenRun | None = None


class TokenRun:
    """Deliveries of one token to each of the same choices, of which nothing else is unsent."""

    def __init__(self, first: Delivery, requests: list[BufferedRequest]) -> None:
        """`requests`: of each entry of the first delivery, which is not in the run yet."""
        self.requests = requests
        # Steps after which it is due.
        self.num_steps = min(request.group.tokens_per_frame for request in requests)
        # The index of each choice's next token to send.
        self._next_indices = first.first_indices
        self._attachments, self._choices = first.attachments, first.choices
        # By step, the tokens of all choices.
        self._token_ids: list[list[int]] = []

    @classmethod
    def beginning(
        cls, delivery: Delivery, find: Callable[[int], BufferedRequest | None]
    ) -> Self | None:
        """A run that this delivery may be the first of, or None. `find` returns a registered
        request of which nothing is unsent."""
        if not _is_plain(delivery) or 0 in delivery.first_indices:
            return None
        requests = []
        for attachment in delivery.attachments:
            request = find(attachment)
            if request is None:
                return None
            requests.append(request)
        return cls(delivery, requests)

    @property
    def is_due(self) -> bool:
        return len(self._token_ids) >= self.num_steps

    @property
    def is_empty(self) -> bool:
        return not self._token_ids

    def add(self, delivery: Delivery) -> bool:
        """Add the tokens of a step; False if they are not those of the same choices."""
        if (
            delivery.attachments != self._attachments
            or delivery.choices != self._choices
            or not _is_plain(delivery)
        ):
            return False
        self._token_ids.append(delivery.token_ids)
        return True

    def take(self) -> Delivery:
        """Take what was added, and begin again."""
        steps, self._token_ids = self._token_ids, []
        firsts, num_choices = self._next_indices, len(self._choices)
        self._next_indices = [first + len(steps) for first in firsts]
        return Delivery(
            self._attachments,
            self._choices,
            firsts,
            [len(steps)] * num_choices,
            list(chain.from_iterable(zip(*steps, strict=True))),
        )

    def end(self) -> None:
        """End: requests know from now on which tokens were sent."""
        for request, choice, index in zip(
            self.requests, self._choices, self._next_indices, strict=True
        ):
            request.next_indices[choice] = index
            request.run = None


def _is_plain(delivery: Delivery) -> bool:
    """Whether each entry has one token, and no log-probabilities."""
    num_entries = len(delivery.attachments)
    return not (
        len(delivery.token_ids) != num_entries
        or delivery.num_tokens.count(1) != num_entries
        or delivery.prompt_logprobs
        or any(delivery.logprobs)
    )
