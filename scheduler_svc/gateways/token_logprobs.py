"""Log-probabilities in a frame to a gateway."""

from quire.internal.v1 import scheduler_pb2
from scheduler_svc.core.logprobs import ENTRY_BYTES, unpack_logprobs
from scheduler_svc.core.sequence import Delivery


def add_logprobs(deltas: scheduler_pb2.TokenDeltas, delivery: Delivery) -> None:
    """Adds those of a delivery whose tokens stand last in the deltas."""
    num_tokens_before = len(deltas.token_ids) - len(delivery.token_ids)
    _count_none(deltas, num_tokens_before)
    for num_tokens, packed in zip(delivery.num_tokens, delivery.logprobs, strict=True):
        num_entries = len(packed) // ENTRY_BYTES // num_tokens
        deltas.logprobs.num_entries.extend([num_entries] * num_tokens)
        token_ids, logprobs, ranks = unpack_logprobs(packed)
        deltas.logprobs.token_ids.extend(token_ids)
        deltas.logprobs.logprobs.extend(logprobs)
        deltas.logprobs.ranks.extend(ranks)


def complete(deltas: scheduler_pb2.TokenDeltas) -> None:
    """Gives every token its count, where one has some."""
    if deltas.HasField("logprobs"):
        _count_none(deltas, len(deltas.token_ids))


def _count_none(deltas: scheduler_pb2.TokenDeltas, num_tokens: int) -> None:
    counts = deltas.logprobs.num_entries
    counts.extend([0] * (num_tokens - len(counts)))
