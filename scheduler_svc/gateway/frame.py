"""A message to a gateway under construction."""

from quire.internal.v1 import scheduler_pb2
from scheduler_svc.core.logprobs import ENTRY_BYTES
from scheduler_svc.core.request import Delivery


class Frame:
    """Collects deliveries. Log-probabilities stay packed: one request may have ten megabytes of
    them, and all other frames wait while one is filled."""

    def __init__(self, epoch: int) -> None:
        self.message = scheduler_pb2.ConnectResponse(epoch=epoch)
        self._logprobs: list[bytes] = []
        self._num_entries = 0

    @property
    def num_tokens(self) -> int:
        """The number of tokens, those of log-probabilities included."""
        return len(self.message.deltas.token_ids) + self._num_entries

    def add(self, delivery: Delivery) -> None:
        """Add the tokens of a delivery."""
        deltas = self.message.deltas
        if any(delivery.logprobs):
            self._pad_num_logprobs(len(deltas.num_tokens))
            deltas.num_logprobs.extend(
                len(packed) // ENTRY_BYTES // num_tokens
                for packed, num_tokens in zip(delivery.logprobs, delivery.num_tokens, strict=True)
            )
            self._logprobs += delivery.logprobs
            self._num_entries += num_entries(delivery)
        for at, packed in enumerate(delivery.prompt_logprobs):
            if packed:
                deltas.prompt_logprobs.add(entry=len(deltas.num_tokens) + at, logprobs=packed)
                self._num_entries += len(packed) // ENTRY_BYTES
        deltas.attachments.extend(delivery.attachments)
        deltas.choices.extend(delivery.choices)
        deltas.first_indices.extend(delivery.first_indices)
        deltas.num_tokens.extend(delivery.num_tokens)
        deltas.token_ids.extend(delivery.token_ids)

    def complete(self) -> scheduler_pb2.ConnectResponse:
        """Return the complete message."""
        if self._logprobs:
            self._pad_num_logprobs(len(self.message.deltas.num_tokens))
            self.message.deltas.logprobs = b"".join(self._logprobs)
        return self.message

    def _pad_num_logprobs(self, num_places: int) -> None:
        counts = self.message.deltas.num_logprobs
        counts.extend([0] * (num_places - len(counts)))


def num_entries(delivery: Delivery) -> int:
    """The number of log-probabilities in a delivery."""
    return sum([len(packed) for packed in delivery.logprobs]) // ENTRY_BYTES
