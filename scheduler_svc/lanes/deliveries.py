"""What a commit has journaled, for those who want to hear of it."""

from itertools import accumulate

from scheduler_svc.core.sequence import Delivery, Sequence, Subscriber
from scheduler_svc.lanes.draft import Draft


def deliver(draft: Draft) -> None:
    """Notes what is journaled now, and tells each subscriber of its sequences in one go."""
    for sequence, next_index in zip(draft.journaled, draft.runs.next_indices, strict=True):
        sequence.num_journaled = next_index
    # Some may have been cut while the commit was on its way.
    heard = [
        other.group
        for other in draft.journaled
        if other.group.error is None and (other.end is None or not other.is_cut)
    ]
    subscribers = {group.subscriber: None for group in heard}
    is_whole = len(subscribers) == 1 and len(heard) == len(draft.journaled)
    for subscriber in subscribers:
        subscriber.deliver(_whole(draft) if is_whole else _part(draft, subscriber))


def _whole(draft: Draft) -> Delivery:
    """Everything: one gateway has all the requests."""
    return Delivery(
        attachments=[sequence.group.attachment for sequence in draft.journaled],
        choices=[sequence.choice for sequence in draft.journaled],
        first_indices=draft.runs.first_indices,
        num_tokens=_counts(draft),
        token_ids=draft.runs.token_ids,
        logprobs=draft.runs.logprobs,
    )


def _part(draft: Draft, subscriber: Subscriber) -> Delivery:
    """What one of several is to hear."""
    delivery, counts = Delivery(), _counts(draft)
    starts = accumulate(counts, initial=0)
    logprobs = draft.runs.logprobs or [b""] * len(counts)
    for sequence, first, start, count, packed in zip(
        draft.journaled, draft.runs.first_indices, starts, counts, logprobs, strict=False
    ):
        if _hears(subscriber, sequence):
            delivery.attachments.append(sequence.group.attachment)
            delivery.choices.append(sequence.choice)
            delivery.first_indices.append(first)
            delivery.num_tokens.append(count)
            delivery.token_ids += draft.runs.token_ids[start : start + count]
            delivery.logprobs.append(packed)
    return delivery


def _hears(subscriber: Subscriber, sequence: Sequence) -> bool:
    return sequence.group.subscriber is subscriber and not sequence.is_cut


def _counts(draft: Draft) -> list[int]:
    runs = draft.runs
    return [end - first for first, end in zip(runs.first_indices, runs.next_indices, strict=True)]
