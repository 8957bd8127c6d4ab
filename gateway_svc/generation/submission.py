"""Prepares a client's request for the scheduler: validates, tokenizes and resolves it."""

import asyncio
import hashlib
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import grpc

from gateway_svc.access.tenant import Tenant
from gateway_svc.generation import (
    beam_search,
    logits_params,
    output_grammar,
    output_parsing,
    tenant_limits,
    validation,
)
from gateway_svc.generation.beam_search import Search
from gateway_svc.generation.checking import checked
from gateway_svc.generation.choice import Choice, create_choices
from gateway_svc.generation.error_fields import prompt_field
from gateway_svc.generation.field_checks import check_tokens_of_text
from gateway_svc.generation.first_token import check_first_token
from gateway_svc.generation.truncation import (
    exchange_starts,
    from_exchange,
    num_fitting_tokens,
    num_kept_tokens,
)
from gateway_svc.generation.validation import GenerationRequest
from gateway_svc.text.detokenizer import Detokenizer
from gateway_svc.text.served_model import Model, ModelLimits
from quire.internal.v1 import gateway_pb2, logits_pb2, scheduler_pb2
from quire.service.errors import failed
from quire.v1 import conversation_pb2, inference_pb2

# Formats whose output is a sequence of pieces.
_OF_PIECES = (gateway_pb2.FORMAT_RESPONSE, gateway_pb2.FORMAT_MESSAGE)


@dataclass(frozen=True)
class PreparedRequest:
    """A validated request, ready to submit, and its choices."""

    model: Model
    submission: scheduler_pb2.Submission
    resume_state: gateway_pb2.ResumeState
    # The client's field with the prompt.
    prompt_field: str
    choices: Sequence[Choice]


class RequestsInPreparation:
    """Requests that the scheduler does not have yet; cancelled by principal and id."""

    def __init__(self) -> None:
        # Set on cancellation. An id may be in preparation twice; a cancellation applies to both.
        self._cancelled: dict[tuple[str, str], set[asyncio.Event]] = {}

    @contextmanager
    def track(self, principal: str, request_id: str) -> Iterator[None]:
        """Make a request cancellable during the block. RequestError at the end of the block if it
        was cancelled.
        """
        key = (principal, request_id)
        cancelled = asyncio.Event()
        self._cancelled.setdefault(key, set()).add(cancelled)
        try:
            yield
            if cancelled.is_set():
                raise failed(grpc.StatusCode.CANCELLED, "CANCELLED", "the request was cancelled")
        finally:
            self._cancelled[key].remove(cancelled)
            if not self._cancelled[key]:
                del self._cancelled[key]

    def cancel(self, principal: str, request_id: str) -> bool:
        """Cancel requests of this id; return whether any is in preparation."""
        found = self._cancelled.get((principal, request_id), set())
        for cancelled in found:
            cancelled.set()
        return bool(found)


async def prepare(
    request: GenerationRequest,
    model: Model,
    max_model_len: int | None,
    deadline_s: float | None,
    tenant: Tenant,
    http: gateway_pb2.HttpState | None = None,
    search: Search | None = None,
) -> PreparedRequest:
    """RequestError names the invalid field. `deadline_s` is the time left to the client's call.
    With a `search` the request, of as many choices as beams, is a beam search."""
    limits = model.limits(max_model_len)
    await checked(request, partial(validation.check_request, request, limits))
    if search is not None:
        beam_search.check_request(request)
    tenant_limits.check_request(request, tenant)
    deadline_ms = None if deadline_s is None else round((time.time() + deadline_s) * 1000)
    request_id = request.request_id or secrets.token_hex(16)
    params = request.sampling_params
    drops_exchanges = http is not None and http.drop_exchanges
    all_token_ids, parsing = await _tokenize(request, model, limits, drops_exchanges)
    kept = num_kept_tokens(len(all_token_ids), params, limits.max_model_len)
    prompt_token_ids = all_token_ids[len(all_token_ids) - kept :]
    validation.check_prompt_length(
        prompt_field(request), len(prompt_token_ids), limits.max_model_len
    )
    resolved = validation.resolve(params, request_id, len(prompt_token_ids), limits)
    changes = await _changes_of_logits(request, model, limits, parsing, tenant.principal)
    resolved.logits_params = changes.SerializeToString(deterministic=True)
    resolved.num_lookahead_tokens = logits_params.num_lookahead_tokens(changes)
    state = _create_resume_state(request, model, prompt_token_ids, resolved.stop_token_ids)
    if parsing is not None:
        state.parsing.CopyFrom(parsing)
    if http is not None:
        await _add_http(state, http, model, prompt_token_ids, kept < len(all_token_ids))
    tenant_limits.cap_max_tokens(resolved, state.num_choices, tenant)
    _finish_params(resolved, params, state, search, limits.vocab_size)
    submission = scheduler_pb2.Submission(
        request_id=request_id,
        principal=tenant.principal,
        digest=request_digest(request, search),
        prompt_token_ids=prompt_token_ids,
        params=resolved,
        deadline_ms=deadline_ms,
        resume_window_s=request.resume_window_s if request.HasField("resume_window_s") else None,
        priority=tenant_limits.priority(request, tenant),
        # The beams of a search are known to the scheduler alone.
        n=state.num_choices if search is None else 1,
        cache_salt=tenant.cache_salt(request.cache_salt),
        opaque=state.SerializeToString(),
        deferred_delivery=search is not None or _is_deferred(request, parsing),
        tenant=tenant.policy() if tenant.principal else None,
        has_client_id=bool(request.request_id),
    )
    return PreparedRequest(
        model, submission, state, prompt_field(request), create_choices(request_id, state, model)
    )


def _finish_params(
    resolved: scheduler_pb2.ResolvedParams,
    params: inference_pb2.SamplingParams,
    state: gateway_pb2.ResumeState,
    search: Search | None,
    vocab_size: int,
) -> None:
    """Limit the size of the output, and fill in the parameters of a search."""
    if search is None:
        num_prompt_tokens = state.num_prompt_tokens
        validation.limit_logprobs(resolved, params, state.num_choices, num_prompt_tokens)
    else:
        beam_search.resolve(resolved, params, search, vocab_size)
        state.search.CopyFrom(search.state())


async def _add_http(
    state: gateway_pb2.ResumeState,
    http: gateway_pb2.HttpState,
    model: Model,
    prompt_token_ids: list[int],
    is_cut: bool,
) -> None:
    """Add the state of an HTTP request, with what precedes the output of a prompt that may have
    been cut."""
    if http.format in _OF_PIECES:
        # Its events are those of pieces, even if all of these are content.
        state.parsing.SetInParent()
    state.http.CopyFrom(http)
    if http.return_token_ids:
        state.http.prompt_token_ids.extend(prompt_token_ids)
    if http.echo and is_cut:
        state.http.echo = await model.decode(prompt_token_ids, False)
    if http.echo_logprobs:
        offsets = await model.text_offsets(prompt_token_ids, state.http.echo)
        state.http.echo_offsets.extend(offsets)


async def _tokenize(
    request: GenerationRequest, model: Model, limits: ModelLimits, drops_exchanges: bool
) -> tuple[list[int], gateway_pb2.OutputParsing | None]:
    """Tokenize the prompt of a validated request, and choose how its output is split. With
    `drops_exchanges` the first exchanges of a conversation that is too long are left out."""
    parsing = None
    match request.WhichOneof("prompt"):
        case "token_ids":
            return list(request.token_ids.ids), None
        case "text":
            token_ids = await model.encode(request.text, True)
        case _:
            output_parsing.check_formats(request.conversation, model.formats)
            rendered, token_ids = await _render(request.conversation, model, limits)
            num_fitting = num_fitting_tokens(request.sampling_params, limits.max_model_len)
            if drops_exchanges and len(token_ids) > num_fitting:
                rendered, token_ids = await _last_exchanges(
                    request.conversation, model, limits, num_fitting
                )
            has_format = request.sampling_params.HasField("structured_output")
            parsing = output_parsing.choose(
                request.conversation, model.formats, rendered, has_format
            )
    check_tokens_of_text(prompt_field(request), token_ids, limits.vocab_size)
    return token_ids, parsing


async def _render(
    conversation: conversation_pb2.Conversation, model: Model, limits: ModelLimits
) -> tuple[str, list[int]]:
    """The text of a conversation, and its tokens."""
    rendered = await model.render(conversation)
    validation.check_text("conversation", rendered, limits)
    return rendered, await model.encode(rendered, False)


async def _last_exchanges(
    conversation: conversation_pb2.Conversation, model: Model, limits: ModelLimits, num_tokens: int
) -> tuple[str, list[int]]:
    """The text and the tokens of as many of the last exchanges as fit into `num_tokens`, or of the
    last one."""
    starts = exchange_starts(conversation)
    low, high = 0, len(starts) - 1
    while low < high:
        middle = (low + high) // 2
        _, token_ids = await _render(from_exchange(conversation, starts[middle]), model, limits)
        if len(token_ids) > num_tokens:
            low = middle + 1
        else:
            high = middle
    return await _render(from_exchange(conversation, starts[low]), model, limits)


async def _changes_of_logits(
    request: GenerationRequest,
    model: Model,
    limits: ModelLimits,
    parsing: gateway_pb2.OutputParsing | None,
    principal: str,
) -> logits_pb2.LogitsParams:
    grammar = await output_grammar.build(request, model, parsing, principal)
    message = None if grammar is None else grammar.to_proto()
    changes = await logits_params.build(request.sampling_params, model, limits, message)
    if grammar is not None:
        sets_stop_tokens = bool(request.sampling_params.stop_token_ids)
        check_first_token(changes, grammar.compiled.first_tokens, sets_stop_tokens)
    return changes


def _create_resume_state(
    request: GenerationRequest,
    model: Model,
    prompt_token_ids: Sequence[int],
    stop_token_ids: Iterable[int],
) -> gateway_pb2.ResumeState:
    """`stop_token_ids` includes the end-of-sequence ids that end a choice."""
    params = request.sampling_params
    skip = params.skip_special_tokens or not params.HasField("skip_special_tokens")
    # The output continues the prompt's text; after a conversation it mostly begins a new message.
    begins = request.WhichOneof("prompt") == "conversation" and not (
        request.conversation.continue_final_message
    )
    context = () if begins else prompt_token_ids
    return gateway_pb2.ResumeState(
        model=model.name,
        num_choices=params.n if params.HasField("n") else 1,
        num_prompt_tokens=len(prompt_token_ids),
        context_token_ids=Detokenizer.trim_context(model.vocabulary, skip, context),
        stop=params.stop,
        stop_token_ids=stop_token_ids,
        skip_special_tokens=skip,
        resume_window_s=request.resume_window_s,
        include_stop_str_in_output=params.include_stop_str_in_output,
        first_prompt_token_id=prompt_token_ids[0] if params.HasField("prompt_logprobs") else None,
        min_tokens=params.min_tokens,
        omit_text=params.HasField("detokenize") and not params.detokenize,
    )


def _is_deferred(request: GenerationRequest, parsing: gateway_pb2.OutputParsing | None) -> bool:
    """Whether to request deferred delivery: for unary requests whose end is not in their text. A
    stop string or an only call must be found early, as the worker generates until then.
    """
    is_unary = isinstance(request, inference_pb2.GenerateRequest)
    ends_in_text = request.sampling_params.stop or (parsing is not None and parsing.single_call)
    return is_unary and not ends_in_text


def request_digest(request: GenerationRequest, search: Search | None = None) -> bytes:
    """The same for unary and streaming calls, whose messages have the same fields. Excludes the
    resume window, which does not affect the result.
    """
    hashed = request
    if request.HasField("resume_window_s"):
        hashed = type(request)()
        hashed.CopyFrom(request)  # type: ignore[arg-type]
        hashed.ClearField("resume_window_s")
    digest = hashlib.sha256(hashed.SerializeToString(deterministic=True))
    if search is not None:
        digest.update(repr(search).encode())
    return digest.digest()
