"""Delivers the tokens that a commit has journaled to their subscribers."""

from operator import sub

from scheduler_svc.core.request import Delivery
from scheduler_svc.lane.steps.step_builder import StepBuilder


def deliver(builder: StepBuilder) -> None:
    """Update the journaled counts, and send each subscriber one delivery."""
    for sequence, next_index in zip(
        builder.journaled, builder.token_ranges.next_indices, strict=True
    ):
        sequence.num_journaled = next_index
    # Sequences may have been truncated during the commit.
    delivered = [
        other.group
        for other in builder.journaled
        # `not is_truncated` inlined: this runs over all rows in every step.
        if other.group.error is None and (other.end is None or not other.is_truncated)
    ]
    subscribers = {group.subscriber: None for group in delivered}
    tokens = _all_tokens(builder)
    if len(subscribers) == 1 and len(delivered) == len(builder.journaled):
        delivered[0].subscriber.deliver(tokens)
        return
    for subscriber in subscribers:
        places = [
            at
            for at, sequence in enumerate(builder.journaled)
            if sequence.group.subscriber is subscriber and not sequence.is_truncated
        ]
        subscriber.deliver(tokens.part(places))


def _all_tokens(builder: StepBuilder) -> Delivery:
    ranges = builder.token_ranges
    return Delivery(
        attachments=[sequence.group.attachment for sequence in builder.journaled],
        choices=[sequence.choice for sequence in builder.journaled],
        first_indices=ranges.first_indices,
        num_tokens=list(map(sub, ranges.next_indices, ranges.first_indices)),
        token_ids=ranges.token_ids,
        logprobs=ranges.logprobs,
        prompt_logprobs=ranges.prompt_logprobs,
    )
