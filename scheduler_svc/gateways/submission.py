"""A gateway's submission as a group of sequences and as its record."""

from array import array
from collections.abc import Iterator

from quire.internal.v1 import scheduler_pb2
from quire.service.errors import RequestError, invalid
from scheduler_svc.core.sequence import Group, Params, Sequence, Subscriber
from scheduler_svc.store.requests import RequestKey, RequestRecord

MAX_CHOICES = 16


def group_of(
    submission: scheduler_pb2.Submission,
    sequence_ids: Iterator[int],
    subscriber: Subscriber,
) -> Group:
    params = submission.params
    group = Group(
        key=RequestKey(submission.principal, submission.request_id),
        params=Params(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            seed=params.seed,
            max_tokens=params.max_tokens,
            num_prompt_logprobs=params.num_prompt_logprobs,
        ),
        subscriber=subscriber,
        attachment=submission.attachment,
        priority=submission.priority,
        cache_salt=submission.cache_salt,
    )
    prompt = array("I", submission.prompt_token_ids)
    stop_token_ids = frozenset(params.stop_token_ids)
    group.sequences = [
        Sequence(
            next(sequence_ids),
            group,
            choice,
            prompt[:],
            num_prompt_tokens=len(prompt),
            num_tokens=len(prompt),
            stop_token_ids=stop_token_ids,
        )
        for choice in range(_num_choices(submission))
    ]
    return group


def _num_choices(submission: scheduler_pb2.Submission) -> int:
    return submission.n if submission.HasField("n") else 1


def record_of(submission: scheduler_pb2.Submission, sequence_id: int) -> RequestRecord:
    return RequestRecord(
        key=RequestKey(submission.principal, submission.request_id),
        digest=submission.digest,
        prompt_token_ids=tuple(submission.prompt_token_ids),
        params=submission.params.SerializeToString(),
        sequence_id=sequence_id,
        deadline_ms=submission.deadline_ms if submission.HasField("deadline_ms") else None,
        opaque=submission.opaque,
    )


def malformed(submission: scheduler_pb2.Submission) -> RequestError | None:
    """What a gateway must not send; it has told its client before."""
    if not submission.prompt_token_ids:
        return invalid("prompt", "PROMPT_EMPTY", "has no tokens")
    if submission.params.max_tokens < 1:
        return invalid("sampling_params.max_tokens", "OUT_OF_RANGE", "must be at least 1")
    if not submission.params.temperature >= 0:
        return invalid("sampling_params.temperature", "OUT_OF_RANGE", "must be at least 0")
    if not 0 < submission.params.top_p <= 1:
        return invalid("sampling_params.top_p", "OUT_OF_RANGE", "must be above 0, at most 1")
    if not 1 <= _num_choices(submission) <= MAX_CHOICES:
        return invalid(
            "sampling_params.n", "OUT_OF_RANGE", f"is {submission.n}; must be 1 to {MAX_CHOICES}"
        )
    return None
