"""A client's request as the scheduler gets it."""

import hashlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from gateway_svc import prompts, validation
from gateway_svc.choice import Choice
from gateway_svc.continuation import choices_of, state_of
from gateway_svc.served_model import Model
from gateway_svc.validation import GenerationRequest
from quire.internal.v1 import gateway_pb2, scheduler_pb2
from quire.v1 import inference_pb2


@dataclass(frozen=True)
class Submitted:
    """A checked request, and the choices that it writes."""

    model: Model
    submission: scheduler_pb2.Submission
    state: gateway_pb2.StreamState
    choices: Sequence[Choice]


async def prepare(
    request: GenerationRequest, model: Model, max_model_len: int | None, deadline_s: float | None
) -> Submitted:
    """RequestError names the field at fault. `deadline_s` is how long the client waits."""
    limits = model.limits(max_model_len)
    validation.check_request(request, limits)
    deadline_ms = None if deadline_s is None else round((time.time() + deadline_s) * 1000)
    prompt = await prompts.tokenize(request, model, limits)
    request_id = request.request_id or secrets.token_hex(16)
    params = request.sampling_params
    resolved = validation.resolve(params, request_id, len(prompt.token_ids), limits)
    state = state_of(request, model, prompt, resolved.stop_token_ids)
    validation.check_num_logprobs(resolved, state.num_choices)
    submission = scheduler_pb2.Submission(
        request_id=request_id,
        digest=digest_of(request),
        prompt_token_ids=prompt.token_ids,
        params=resolved,
        deadline_ms=deadline_ms,
        resume_window_s=request.resume_window_s if request.HasField("resume_window_s") else None,
        priority=request.priority if request.HasField("priority") else None,
        n=state.num_choices,
        cache_salt=request.cache_salt.encode(),
        opaque=state.SerializeToString(),
        patient=_is_patient(request),
    )
    return Submitted(model, submission, state, choices_of(state, model))


def _is_patient(request: GenerationRequest) -> bool:
    """Nobody sees its tokens before its end. Where a stop string may end it each of them is
    looked at as it comes, for a worker writes on until the string is found.
    """
    is_unary = isinstance(request, inference_pb2.GenerateRequest)
    return is_unary and not request.sampling_params.stop


def digest_of(request: GenerationRequest) -> bytes:
    """The same for both ways to ask: their messages have the same fields. How long it runs on
    without a client is no part of what is asked for.
    """
    asked = request
    if request.HasField("resume_window_s"):
        asked = type(request)()
        asked.CopyFrom(request)  # type: ignore[arg-type]
        asked.ClearField("resume_window_s")
    return hashlib.sha256(asked.SerializeToString(deterministic=True)).digest()
