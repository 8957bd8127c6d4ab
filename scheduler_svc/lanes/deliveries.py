"""What a commit has journaled, for those who want to hear of it."""

from scheduler_svc.core.sequence import Delivery, Subscriber
from scheduler_svc.lanes.draft import Draft


def deliver(draft: Draft) -> None:
    """Notes what is journaled now, and tells each subscriber of its sequences in one go."""
    for subscriber, delivery in _deliveries(draft).items():
        subscriber.deliver(delivery)


def _deliveries(draft: Draft) -> dict[Subscriber, Delivery]:
    deliveries: dict[Subscriber, Delivery] = {}
    runs, start = draft.runs, 0
    for sequence, first, end in zip(
        draft.journaled, runs.first_indices, runs.next_indices, strict=True
    ):
        count, group = end - first, sequence.group
        sequence.num_journaled = end
        # It may have been cut while the commit was on its way.
        if not sequence.is_cut:
            delivery = deliveries.get(group.subscriber)
            if delivery is None:
                delivery = deliveries[group.subscriber] = Delivery()
            delivery.attachments.append(group.attachment)
            delivery.choices.append(sequence.choice)
            delivery.first_indices.append(first)
            delivery.num_tokens.append(count)
            if count == 1:
                delivery.token_ids.append(runs.token_ids[start])
            else:
                delivery.token_ids += runs.token_ids[start : start + count]
        start += count
    return deliveries
