"""Buffers tokens of deferred-delivery requests until a frame is worth sending."""

from dataclasses import dataclass

from scheduler_svc.core.request import Delivery
from scheduler_svc.core.sequence import Group, Sequence

# All buffered tokens are due once a choice has this many. From then on the choices of a connection
# fill at the same pace, and are sent in one frame.
DEFERRED_TOKENS = 32
# All buffered tokens are also due at this total, those of log-probabilities included: a frame stays
# far below the limit at which a gateway that does not read is disconnected.
MAX_BUFFERED_TOKENS = 100_000


@dataclass(frozen=True, slots=True)
class _Request:
    group: Group
    # By choice, the index of the next token to send.
    next_indices: list[int]


class TokenBuffer:
    """Journaled but unsent tokens of a connection's deferred-delivery requests.

    The tokens stay in their sequences; the buffer has the index up to which each choice was sent.
    The first token of a choice is not buffered, because it ends the time to first token.
    """

    def __init__(self) -> None:
        # A choice, or the total, has reached its limit.
        self.is_due = False
        # Buffered since the last `take_all`, tokens taken of single choices included.
        self._num_buffered = 0
        # By attachment.
        self._requests: dict[int, _Request] = {}

    def register(self, group: Group) -> None:
        """Buffer a request from here on; its tokens so far have been sent."""
        next_indices = [len(sequence.deliverable) for sequence in group.outputs]
        self._requests[group.attachment] = _Request(group, next_indices)

    def remove(self, attachment: int) -> None:
        """Forget a request, if it is registered."""
        self._requests.pop(attachment, None)

    def add(self, delivery: Delivery) -> Delivery:
        """Buffer a delivery; return the part of it to send at once."""
        if not self._requests:
            return delivery
        places = self._urgent(delivery)
        return delivery if len(places) == len(delivery.attachments) else delivery.part(places)

    def take_all(self) -> Delivery:
        """Take all buffered tokens."""
        self.is_due = False
        self._num_buffered = 0
        rest = Delivery()
        for request in self._requests.values():
            for sequence in request.group.outputs:
                _take(rest, request, sequence)
        return rest

    def take(self, sequence: Sequence) -> Delivery:
        """Take the buffered tokens of one choice."""
        rest = Delivery()
        request = self._requests.get(sequence.group.attachment)
        if request is not None:
            _take(rest, request, sequence)
        return rest

    def _urgent(self, delivery: Delivery) -> list[int]:
        """Places of unregistered requests and of first tokens. Runs in every step."""
        requests, places = self._requests, []
        for at, (attachment, choice, first, count) in enumerate(
            zip(
                delivery.attachments,
                delivery.choices,
                delivery.first_indices,
                delivery.num_tokens,
                strict=True,
            )
        ):
            request = requests.get(attachment)
            if request is None:
                places.append(at)
            elif first == 0:
                places.append(at)
                request.next_indices[choice] = count
            else:
                self._num_buffered += count * (1 + request.group.params.num_journaled_logprobs)
                if first + count - request.next_indices[choice] >= DEFERRED_TOKENS:
                    self.is_due = True
        self.is_due |= self._num_buffered >= MAX_BUFFERED_TOKENS
        return places


def add_deliverable(delivery: Delivery, attachment: int, sequence: Sequence, first: int) -> int:
    """Add a choice's deliverable tokens from the index `first` on; return the end index."""
    token_ids = sequence.deliverable[first:].tolist()
    end = first + len(token_ids)
    if token_ids:
        packed = sequence.logprobs_of(first, end)
        of_prompt = bytes(sequence.prompt_logprobs) if first == 0 else b""
        delivery.add(attachment, sequence.choice, first, token_ids, packed, of_prompt)
    return end


def _take(delivery: Delivery, request: _Request, sequence: Sequence) -> None:
    choice = sequence.choice
    request.next_indices[choice] = add_deliverable(
        delivery, request.group.attachment, sequence, request.next_indices[choice]
    )
