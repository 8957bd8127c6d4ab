"""What the scheduler makes of the fields of a submission."""

from array import array

from quire.internal.v1 import scheduler_pb2
from quire.service.tracing.context import TraceContext
from scheduler_svc.core.limits import RATES, PrincipalLimits, Reservation
from scheduler_svc.gateway.attachments import key_of
from scheduler_svc.gateway.validation import num_choices
from scheduler_svc.store.requests import RequestRecord

# Fields of a tenant's policy beside its limits.
_NO_LIMITS = frozenset({"weight", "tenant_class"})


def reservation_of(submission: scheduler_pb2.Submission) -> Reservation:
    """What a request needs of its tenant's limits."""
    num_tokens = len(submission.prompt_token_ids)
    return Reservation(submission.principal, num_tokens, submission.resume_window_s > 0)


def limits_of(policy: scheduler_pb2.TenantPolicy) -> PrincipalLimits:
    """The limits of a tenant's policy."""
    given = {field.name: value for field, value in policy.ListFields()}
    limits = {name: given[name] for name in given.keys() - _NO_LIMITS}
    # A rate of 0 is never refilled; keys files have none.
    rates = {name: max(1, limits[name]) for name in RATES if name in limits}
    return PrincipalLimits(**{**limits, **rates})


def record_of(submission: scheduler_pb2.Submission, sequence_id: int) -> RequestRecord:
    """Build the record of a submission; choice i has the sequence id `sequence_id` + i."""
    given, trace = submission.HasField, submission.trace_context
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
        trace_context=TraceContext.parse(trace.traceparent, trace.tracestate),
    )
