"""Buffers tokens of requests with a stream interval, or with deferred delivery, until a frame is
worth sending."""

from array import array

from scheduler_svc.core.request import Delivery
from scheduler_svc.core.sequence import Group, Sequence
from scheduler_svc.gateway.token_run import BufferedRequest, TokenRun

# All buffered tokens are due at this total, those of log-probabilities included: a frame stays far
# below the limit at which a gateway that does not read is disconnected.
MAX_BUFFERED_TOKENS = 100_000


class TokenBuffer:
    """Journaled but unsent tokens of a connection's requests that do not receive each at once.

    The tokens stay in their sequences; the buffer has the index up to which each choice was sent.
    The first token of a choice is not buffered, because it ends the time to first token. All
    buffered tokens are due once a choice has as many as its request receives together. From then on
    the choices of a connection fill at the same pace, and are sent in one frame.
    """

    def __init__(self) -> None:
        # A choice, or the total, has reached its limit.
        self.is_due = False
        # Buffered since the last `take_all`, tokens taken of single choices included.
        self._num_buffered = 0
        # By attachment; and those with buffered tokens outside of runs.
        self._requests: dict[int, BufferedRequest] = {}
        self._unsent: dict[int, BufferedRequest] = {}
        # By the first choice of each: a lane whose rows only decode delivers to the same ones.
        self._runs: dict[tuple[int, int], TokenRun] = {}

    def register(self, group: Group) -> None:
        """Buffer a request from here on; its tokens so far have been sent."""
        next_indices = [_num_deliverable(sequence) for sequence in group.outputs]
        self._requests[group.attachment] = BufferedRequest(group, next_indices)

    def remove(self, attachment: int) -> None:
        """Forget a request, if it is registered."""
        if (request := self._requests.get(attachment)) is not None:
            self._end_run(request.run)
            del self._requests[attachment]
            self._unsent.pop(attachment, None)

    def add(self, delivery: Delivery) -> Delivery:
        """Buffer a delivery; return the part of it to send at once."""
        if not (self._requests and delivery.attachments):
            return delivery
        if self._add_to_run(delivery):
            return Delivery()
        places = self._urgent(delivery)
        return delivery if len(places) == len(delivery.attachments) else delivery.part(places)

    def take_all(self) -> Delivery:
        """Take all buffered tokens."""
        self.is_due = False
        self._num_buffered = 0
        rest = Delivery()
        for run in self._runs.values():
            if not run.is_empty:
                _join(rest, run.take())
        for request in self._unsent.values():
            for sequence in request.group.outputs:
                _take(rest, request, sequence)
        self._unsent.clear()
        return rest

    def take(self, sequence: Sequence) -> Delivery:
        """Take the buffered tokens of one choice."""
        rest = Delivery()
        request = self._requests.get(sequence.group.attachment)
        if request is not None:
            self._end_run(request.run)
            _take(rest, request, sequence)
        return rest

    def _add_to_run(self, delivery: Delivery) -> bool:
        """Add a delivery to its run, which may begin with it; False if it has none."""
        key = delivery.attachments[0], delivery.choices[0]
        run = self._runs.get(key)
        if run is None:
            run = TokenRun.beginning(delivery, self._without_unsent)
            if run is None:
                return False
            for request in run.requests:
                # A request has an entry for each of its choices.
                if request.run is not run:
                    self._end_run(request.run)
                    request.run = run
            self._runs[key] = run
        if not run.add(delivery):
            self._end_run(run)
            return False
        self._num_buffered += len(delivery.token_ids)
        self.is_due |= run.is_due or self._num_buffered >= MAX_BUFFERED_TOKENS
        return True

    def _without_unsent(self, attachment: int) -> BufferedRequest | None:
        request = self._requests.get(attachment)
        if request is None or attachment in self._unsent:
            return None
        return request if request.run is None or request.run.is_empty else None

    def _end_run(self, run: TokenRun | None) -> None:
        """End a run: what it has is unsent."""
        if run is not None:
            run.end()
            if not run.is_empty:
                self._unsent |= {one.group.attachment: one for one in run.requests}
            self._runs = {key: other for key, other in self._runs.items() if other is not run}

    def _urgent(self, delivery: Delivery) -> list[int]:
        """Places of unregistered requests and of first tokens."""
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
                self._end_run(request.run)
                self._unsent[attachment] = request
                self._num_buffered += count * (1 + request.group.params.num_journaled_logprobs)
                num_unsent = first + count - request.next_indices[choice]
                if num_unsent >= request.group.tokens_per_frame:
                    self.is_due = True
        self.is_due |= self._num_buffered >= MAX_BUFFERED_TOKENS
        return places


def _join(rest: Delivery, taken: Delivery) -> None:
    """Add entries of one kind each, without log-probabilities."""
    rest.attachments += taken.attachments
    rest.choices += taken.choices
    rest.first_indices += taken.first_indices
    rest.num_tokens += taken.num_tokens
    rest.token_ids += taken.token_ids
    rest.logprobs += [b""] * len(taken.attachments)


def add_deliverable(delivery: Delivery, attachment: int, sequence: Sequence, first: int) -> int:
    """Add a choice's deliverable tokens from the index `first` on; return the end index."""
    token_ids = _output(sequence, first, _num_deliverable(sequence)).tolist()
    end = first + len(token_ids)
    if token_ids:
        packed = sequence.logprobs_of(first, end)
        of_prompt = bytes(sequence.prompt_logprobs) if first == 0 else b""
        delivery.add(attachment, sequence.choice, first, token_ids, packed, of_prompt)
    return end


def _num_deliverable(sequence: Sequence) -> int:
    """Output tokens that may be sent: journaled, and within the end."""
    most = min(sequence.num_journaled, sequence.num_output_tokens)
    return most if sequence.end is None else min(most, sequence.end.num_output_tokens)


def _output(sequence: Sequence, first: int, end: int) -> "array[int]":
    """Output between two indices, without a copy of all of it."""
    if sequence.is_beam:
        return sequence.output[first:end]
    return sequence.token_ids[sequence.num_prompt_tokens + first : sequence.num_prompt_tokens + end]


def _take(delivery: Delivery, request: BufferedRequest, sequence: Sequence) -> None:
    choice = sequence.choice
    request.next_indices[choice] = add_deliverable(
        delivery, request.group.attachment, sequence, request.next_indices[choice]
    )
