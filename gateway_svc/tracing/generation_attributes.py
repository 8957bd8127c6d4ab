"""Adds what a generation is to the span of its call. No text is part of it.

Names are those of OpenTelemetry's conventions for generative AI, and `quire.…` where it has none.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gateway_svc.generation.validation import GenerationRequest
from gateway_svc.tracing.call_trace import CallTrace
from quire.internal.v1 import scheduler_pb2
from quire.service.tracing.spans import SpanEvent

FIRST_TOKEN: Final = "first token"


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """How a generation ended."""

    request_id: str
    num_prompt_tokens: int
    num_cached_prompt_tokens: int
    num_tokens: int
    num_reasoning_tokens: int
    # Of time.monotonic; None without a token.
    first_token_at: float | None
    # Of its choices; none if it failed.
    finish_reasons: Sequence[str]


def add_request(trace: CallTrace, request: GenerationRequest) -> None:
    """Add what the client asks for; it is not checked yet."""
    params = request.sampling_params
    is_chat = request.WhichOneof("prompt") == "conversation"
    trace.set(
        {
            "gen_ai.operation.name": "chat" if is_chat else "text_completion",
            "gen_ai.request.model": request.model if request.HasField("model") else None,
            "gen_ai.request.choice.count": params.n if params.n > 1 else None,
        }
    )


def add_submission(trace: CallTrace, model: str, submission: scheduler_pb2.Submission) -> None:
    """Add what the request has become, with its defaults filled in."""
    params = submission.params
    trace.set(
        {
            "gen_ai.response.model": model,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "quire.tenant": submission.principal or None,
            "quire.deferred_delivery": submission.deferred_delivery,
        }
    )


def add_result(trace: CallTrace, result: GenerationResult) -> None:
    """Add the end of a generation; a call may have several."""
    trace.set({"gen_ai.response.id": result.request_id})
    trace.count(
        {
            "gen_ai.usage.input_tokens": result.num_prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": result.num_cached_prompt_tokens,
            "gen_ai.usage.output_tokens": result.num_tokens,
            "gen_ai.usage.reasoning.output_tokens": result.num_reasoning_tokens,
        }
    )
    if result.finish_reasons:
        trace.append("gen_ai.response.finish_reasons", list(result.finish_reasons))
    if result.first_token_at is not None:
        age_ns = round((time.monotonic() - result.first_token_at) * 1e9)
        trace.events.append(SpanEvent(FIRST_TOKEN, time.time_ns() - age_ns))
