"""Cancels a request with all its prompts, each of which is a request of its own elsewhere."""

import asyncio

from gateway_svc.access.tenant import Tenant
from gateway_svc.generation.service import GenerationService
from gateway_svc.http.bodies.fields import prompt_id
from gateway_svc.scheduler.events import EndedError
from quire.internal.v1 import gateway_pb2, scheduler_pb2
from quire.service.errors import RequestError

_UNKNOWN = "UNKNOWN_REQUEST"


async def cancel_prompts(request_id: str, tenant: Tenant, service: GenerationService) -> None:
    """End a request of any gateway. RequestError NOT_FOUND if none of its prompts is live."""
    state = _state_here(request_id, tenant, service)
    # First of all: another stream takes the one of a live request over, whose reader would not see
    # the cancellation.
    error = await _cancel(request_id, tenant, service)
    if state is None:
        state = await _stored_state(request_id, tenant, service)
    # None for a request over gRPC.
    num_prompts = 0 if state is None else state.http.num_prompts
    others = [prompt_id(request_id, prompt) for prompt in range(1, num_prompts)]
    errors = await asyncio.gather(*(_cancel(other, tenant, service) for other in others))
    if error is not None and all(errors):
        raise error


async def _cancel(
    request_id: str, tenant: Tenant, service: GenerationService
) -> RequestError | None:
    """End one prompt; the error if it is not live."""
    try:
        await service.cancel(request_id, tenant)
    except RequestError as error:
        if error.info.reason != _UNKNOWN:
            raise
        return error
    return None


def _state_here(
    request_id: str, tenant: Tenant, service: GenerationService
) -> gateway_pb2.ResumeState | None:
    """The state of a request whose client is at this gateway. It may not be stored yet."""
    for stream in service.scheduler.requests.streams:
        request = stream.request
        if (request.principal, request.request_id) == (tenant.principal, request_id):
            return stream.state
    return None


async def _stored_state(
    request_id: str, tenant: Tenant, service: GenerationService
) -> gateway_pb2.ResumeState | None:
    """The state of a request that has ended, or is ending; None if it is unknown."""
    requests = service.scheduler.requests
    attachment = scheduler_pb2.Attachment(request_id=request_id, principal=tenant.principal)
    stream = requests.attach(attachment, on_overflow=lambda: None)
    try:
        await stream.get()
    except EndedError as error:
        return gateway_pb2.ResumeState.FromString(error.opaque)
    except RequestError as error:
        if error.info.reason != _UNKNOWN:
            raise
    finally:
        requests.detach(stream)
    return stream.state
