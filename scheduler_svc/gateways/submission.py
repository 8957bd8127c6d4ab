"""A gateway's submission as a record, and what must not be in it."""

from array import array

from quire.internal.v1 import scheduler_pb2
from quire.service.errors import RequestError, invalid
from scheduler_svc.core.logprobs import MAX_NUM_LOGPROBS
from scheduler_svc.store.requests import RequestKey, RequestRecord

MAX_CHOICES = 16


def key_of(submission: scheduler_pb2.Submission | scheduler_pb2.Attachment) -> RequestKey:
    return RequestKey(submission.principal, submission.request_id)


def record_of(submission: scheduler_pb2.Submission, sequence_id: int) -> RequestRecord:
    """Choice i has the sequence id `sequence_id` + i."""
    given = submission.HasField
    return RequestRecord(
        key=key_of(submission),
        digest=submission.digest,
        prompt_token_ids=array("I", submission.prompt_token_ids),
        params=submission.params.SerializeToString(),
        sequence_id=sequence_id,
        deadline_ms=submission.deadline_ms if given("deadline_ms") else None,
        opaque=submission.opaque,
        num_choices=num_choices(submission),
        priority=submission.priority,
        cache_salt=submission.cache_salt,
        resume_window_s=submission.resume_window_s if given("resume_window_s") else None,
    )


def num_choices(submission: scheduler_pb2.Submission) -> int:
    return submission.n if submission.HasField("n") else 1


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
    if not 0 <= submission.params.min_p <= 1:
        return invalid("sampling_params.min_p", "OUT_OF_RANGE", "must be 0 to 1")
    if not 1 <= num_choices(submission) <= MAX_CHOICES:
        return invalid(
            "sampling_params.n", "OUT_OF_RANGE", f"is {submission.n}; must be 1 to {MAX_CHOICES}"
        )
    if submission.params.num_logprobs > MAX_NUM_LOGPROBS:
        return invalid(
            "sampling_params.logprobs", "OUT_OF_RANGE", f"must be at most {MAX_NUM_LOGPROBS - 1}"
        )
    return None
