"""A client's request as the scheduler gets it."""

import hashlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from gateway_svc import prompts, validation
from gateway_svc.choice import Choice
from gateway_svc.detokenizer import Detokenizer
from gateway_svc.prompts import Prompt
from gateway_svc.served_model import Model
from gateway_svc.validation import GenerationRequest
from quire.internal.v1 import scheduler_pb2
from quire.v1 import inference_pb2


@dataclass(frozen=True)
class Submitted:
    """A checked request, and the choices that it writes."""

    submission: scheduler_pb2.Submission
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
    num_choices = params.n if params.HasField("n") else 1
    submission = scheduler_pb2.Submission(
        request_id=request_id,
        digest=hashlib.sha256(request.SerializeToString(deterministic=True)).digest(),
        prompt_token_ids=prompt.token_ids,
        params=resolved,
        deadline_ms=deadline_ms,
        priority=request.priority if request.HasField("priority") else None,
        n=num_choices,
        cache_salt=request.cache_salt.encode(),
    )
    stop_token_ids = frozenset(resolved.stop_token_ids)
    choices = [
        Choice(index, _detokenizer(model, params, prompt), params.stop, stop_token_ids)
        for index in range(num_choices)
    ]
    return Submitted(submission, choices)


def _detokenizer(model: Model, params: inference_pb2.SamplingParams, prompt: Prompt) -> Detokenizer:
    return Detokenizer(
        model.vocabulary,
        skip_special_tokens=params.skip_special_tokens
        or not params.HasField("skip_special_tokens"),
        context=prompt.token_ids if prompt.is_continued else (),
    )
