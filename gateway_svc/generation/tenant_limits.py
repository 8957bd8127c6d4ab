"""Limits of a tenant that concern single requests. Pure; errors name the invalid field."""

from gateway_svc.access.tenant import Tenant
from gateway_svc.generation.validation import GenerationRequest
from quire.internal.v1 import scheduler_pb2
from quire.service.errors import invalid


def check_request(request: GenerationRequest, tenant: Tenant) -> None:
    """Check all that does not depend on the prompt's tokens. RequestError INVALID_ARGUMENT."""
    priorities, limits, params = tenant.priorities, tenant.limits, request.sampling_params
    if priorities and request.HasField("priority") and request.priority not in priorities:
        raise invalid(
            "priority",
            "PRIORITY_OUT_OF_RANGE",
            f"is {request.priority}; this API key's tenant may use {priorities}",
        )
    if limits.resume_window_s is not None and request.resume_window_s > limits.resume_window_s:
        raise invalid(
            "resume_window_s",
            "RESUME_WINDOW_S_OUT_OF_RANGE",
            f"is {request.resume_window_s}; this API key's tenant may use "
            f"0 to {limits.resume_window_s}",
        )
    if limits.output_tokens is None:
        return
    num_choices = params.n if params.HasField("n") else 1
    if num_choices * max(params.max_tokens, 1) > limits.output_tokens:
        raise invalid(
            "sampling_params.max_tokens",
            "TOO_MANY_OUTPUT_TOKENS",
            f"is {params.max_tokens or 1} for each of {num_choices} choices; this API key's "
            f"tenant may use {limits.output_tokens} output tokens per request",
        )


def background_window_s(setting_s: int, tenant: Tenant) -> int:
    """The resume window of a response in the background: the gateway's setting, at most the
    tenant's limit. RequestError INVALID_ARGUMENT if it is 0."""
    most_s = tenant.limits.resume_window_s
    window_s = setting_s if most_s is None else min(setting_s, most_s)
    if window_s == 0:
        whose = "this gateway" if setting_s == 0 else "this API key's tenant"
        raise invalid("background", "NO_BACKGROUND", f"is true; {whose} permits false only")
    return window_s


def priority(request: GenerationRequest, tenant: Tenant) -> int | None:
    """The request's priority. One outside of the tenant's range was refused."""
    if request.HasField("priority"):
        return request.priority
    return tenant.priorities.default if tenant.priorities else None


def cap_max_tokens(
    resolved: scheduler_pb2.ResolvedParams, num_choices: int, tenant: Tenant
) -> None:
    """Limit `max_tokens`, for requests that did not set it, to the tenant's output tokens."""
    if tenant.limits.output_tokens is not None:
        most = tenant.limits.output_tokens // num_choices
        resolved.max_tokens = min(resolved.max_tokens, most)
