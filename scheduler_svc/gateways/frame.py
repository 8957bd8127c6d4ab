"""One message to a gateway, while it fills."""

from quire.internal.v1 import scheduler_pb2
from scheduler_svc.core.logprobs import ENTRY_BYTES
from scheduler_svc.core.sequence import Delivery


class Frame:
    """Tokens come by whole deliveries. Log-probabilities stay the packed bytes that they are: a
    request's may be some ten megabytes, and everybody's frames wait while one is filled."""

    def __init__(self, epoch: int) -> None:
        self.message = scheduler_pb2.ConnectResponse(epoch=epoch)
        self._logprobs: list[bytes] = []
        self._num_entries = 0

    @property
    def num_tokens(self) -> int:
        """Those of log-probabilities included."""
        return len(self.message.deltas.token_ids) + self._num_entries

    def add(self, delivery: Delivery) -> None:
        deltas = self.message.deltas
        if any(delivery.logprobs):
            self._count_none(len(deltas.num_tokens))
            deltas.num_logprobs.extend(
                len(packed) // ENTRY_BYTES // num_tokens
                for packed, num_tokens in zip(delivery.logprobs, delivery.num_tokens, strict=True)
            )
            self._logprobs += delivery.logprobs
            self._num_entries += num_entries(delivery)
        deltas.attachments.extend(delivery.attachments)
        deltas.choices.extend(delivery.choices)
        deltas.first_indices.extend(delivery.first_indices)
        deltas.num_tokens.extend(delivery.num_tokens)
        deltas.token_ids.extend(delivery.token_ids)

    def complete(self) -> scheduler_pb2.ConnectResponse:
        """The message, to be sent."""
        if self._logprobs:
            self._count_none(len(self.message.deltas.num_tokens))
            self.message.deltas.logprobs = b"".join(self._logprobs)
        return self.message

    def _count_none(self, num_places: int) -> None:
        counts = self.message.deltas.num_logprobs
        counts.extend([0] * (num_places - len(counts)))


def num_entries(delivery: Delivery) -> int:
    """Log-probabilities in it."""
    return sum([len(packed) for packed in delivery.logprobs]) // ENTRY_BYTES
