"""Converts arguments to requests and responses to outputs.

Functions raise TypeError or ValueError for arguments that a message cannot contain.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, cast
from uuid import uuid4

from quire.client.arguments import (
    INT32_MAX,
    INT32_MIN,
    UINT32_MAX,
    check_flag,
    check_integer,
    check_text,
    check_token_ids,
    wrong_type,
)
from quire.client.conversations import (
    Conversation,
    ConversationOptions,
    conversation_proto,
    fill_options,
)
from quire.client.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    RequestOutput,
    Usage,
    prompt_logprobs_from,
)
from quire.client.prompts import (
    Prompt,
    fill_prompt,
    is_conversation,
)
from quire.client.sampling_params import BeamSearchParams, SamplingParams
from quire.v1 import beam_search_pb2, inference_pb2, tokenizer_pb2

_REQUEST_ID = re.compile(r"[!-~]{1,128}")
_Request = TypeVar("_Request", inference_pb2.GenerateRequest, inference_pb2.StreamGenerateRequest)


class RequestOptions(ConversationOptions, total=False):
    """Options of a request other than prompt and sampling parameters."""

    # Random if absent.
    request_id: str
    # The served model's name; required if there are several.
    model: str | None
    # Requests share cached prefixes only if their salts are equal.
    cache_salt: str
    # Lower values are scheduled first, under the priority policy; 0 if absent.
    priority: int | None
    # Seconds for which the request continues without a client, so that it can be resumed. 0, the
    # default, ends it at once.
    resume_window_s: int | None


def fill_request(
    request: _Request,
    prompt: Prompt,
    sampling_params: SamplingParams | None,
    options: RequestOptions,
) -> _Request:
    """Fill an empty request."""
    of_conversation = _fill_options(request, options)
    if sampling_params is not None:
        if not isinstance(sampling_params, SamplingParams):
            raise wrong_type("sampling_params", "SamplingParams", sampling_params)
        request.sampling_params.CopyFrom(sampling_params.to_proto())
    fill_prompt(request, prompt)
    for name in of_conversation:
        if not request.HasField("conversation"):
            raise ValueError(f"{name}: is an option of conversations (got another prompt)")
    if of_conversation:
        fill_options(request.conversation, of_conversation)
    if not request.HasField("request_id"):
        # A retry needs an id, so that the server recognises the request.
        request.request_id = uuid4().hex
    return request


def params_of_each(
    sampling_params: Iterable[SamplingParams | None], num_prompts: int
) -> list[SamplingParams | None]:
    """The parameters of each prompt as a list. TypeError or ValueError for what is none."""
    if isinstance(sampling_params, str | bytes) or not isinstance(sampling_params, Iterable):
        raise wrong_type("sampling_params", "a list of SamplingParams", sampling_params)
    each = list(sampling_params)
    if len(each) != num_prompts:
        raise ValueError(f"{len(each)} sampling parameters for {num_prompts} prompts")
    return each


def check_ids(options: RequestOptions, num_prompts: int) -> None:
    """ValueError for one request id of several prompts, which are a request each."""
    if num_prompts > 1 and options.get("request_id") is not None:
        raise ValueError(f"request_id: is the id of one request (got {num_prompts} prompts)")


def request_output(
    request: inference_pb2.GenerateRequest, response: inference_pb2.GenerateResponse
) -> RequestOutput:
    """Combine a response with its prompt."""
    has_ids = request.HasField("token_ids")
    token_ids = list(request.token_ids.ids if has_ids else response.prompt_token_ids)
    if request.sampling_params.HasField("truncate_prompt_tokens"):
        # The last ones, of a number that depends on the model's context, too.
        token_ids = token_ids[-response.usage.prompt_tokens :]
    return RequestOutput(
        request_id=response.request_id,
        model=response.model,
        prompt=request.text if request.HasField("text") else None,
        # No prompt is empty: it is absent from an older server's response.
        prompt_token_ids=token_ids or None,
        outputs=[CompletionOutput.from_proto(choice) for choice in response.choices],
        usage=Usage.from_proto(response.usage),
        prompt_logprobs=prompt_logprobs_from(response.prompt_logprobs),
    )


def beam_search_request(
    prompt: Prompt, params: BeamSearchParams | None, options: RequestOptions
) -> beam_search_pb2.BeamSearchRequest:
    """TypeError or ValueError for arguments that a request cannot contain."""
    if not isinstance(params, BeamSearchParams | None):
        raise wrong_type("params", "BeamSearchParams", params)
    # All fields but the parameters are the same.
    filled = fill_request(inference_pb2.GenerateRequest(), prompt, None, options)
    request = beam_search_pb2.BeamSearchRequest.FromString(filled.SerializeToString())
    if params is not None:
        request.params.CopyFrom(params.to_proto())
    return request


def beam_search_output(
    request: beam_search_pb2.BeamSearchRequest, response: beam_search_pb2.BeamSearchResponse
) -> BeamSearchOutput:
    """Combine a response with its prompt."""
    has_ids = request.HasField("token_ids")
    return BeamSearchOutput(
        request_id=response.request_id,
        model=response.model,
        prompt=request.text if request.HasField("text") else None,
        prompt_token_ids=list(request.token_ids.ids if has_ids else response.prompt_token_ids),
        sequences=[_sequence(one) for one in response.sequences],
        usage=Usage.from_proto(response.usage),
    )


def _sequence(message: beam_search_pb2.BeamSearchSequence) -> BeamSearchSequence:
    is_stop = message.finish_reason == inference_pb2.FINISH_REASON_STOP
    return BeamSearchSequence(
        text=message.text,
        token_ids=list(message.token_ids),
        finish_reason="stop" if is_stop else "length",
        stop_reason=message.stop_token_id if is_stop else None,
        cum_logprob=message.cumulative_logprob,
        score=message.score,
    )


def tokenize_request(
    prompt: str | Conversation, add_special_tokens: bool | None, model: str | None
) -> tokenizer_pb2.TokenizeRequest:
    check_flag("add_special_tokens", add_special_tokens)
    check_text("model", model)
    request = tokenizer_pb2.TokenizeRequest(model=model, add_special_tokens=add_special_tokens)
    if is_conversation(prompt):
        request.conversation.CopyFrom(conversation_proto(prompt))
    elif isinstance(prompt, str):
        check_text("prompt", prompt)
        request.text = prompt
    else:
        raise wrong_type("prompt", "a text or a conversation", prompt)
    return request


def detokenize_request(
    token_ids: Sequence[int], skip_special_tokens: bool | None, model: str | None
) -> tokenizer_pb2.DetokenizeRequest:
    if token_ids is None:
        raise wrong_type("token_ids", "a list of token ids", token_ids)
    check_token_ids("token_ids", token_ids)
    check_flag("skip_special_tokens", skip_special_tokens)
    check_text("model", model)
    return tokenizer_pb2.DetokenizeRequest(
        model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens
    )


def cancel_request(request_id: str) -> inference_pb2.CancelGenerateRequest:
    _check_request_id(request_id)
    return inference_pb2.CancelGenerateRequest(request_id=request_id)


def check_resumption(request_id: object, next_token_indices: object) -> None:
    _check_request_id(request_id)
    if next_token_indices is None:
        raise wrong_type("next_token_indices", "a list of integers", next_token_indices)
    check_token_ids("next_token_indices", next_token_indices)


def _check_request_id(request_id: object) -> None:
    if not isinstance(request_id, str):
        raise wrong_type("request_id", "a text", request_id)
    if not _REQUEST_ID.fullmatch(request_id):
        raise ValueError(
            "request_id: must have 1 to 128 printable ASCII characters other than the space "
            f"(got {request_id!r:.160})"
        )


def _fill_options(request: _Request, options: RequestOptions) -> ConversationOptions:
    """Fill in all but the options of conversations, and return those that are set."""
    of_conversation: dict[str, Any] = {}
    for name, value in options.items():
        if name not in RequestOptions.__annotations__:
            raise TypeError(f"{name}: no such option of a request (got {value!r:.100})")
        if name in ConversationOptions.__annotations__:
            if value is not None:
                of_conversation[name] = value
            continue
        if name == "priority":
            check_integer(name, value, INT32_MAX, INT32_MIN)
        elif name == "resume_window_s":
            check_integer(name, value, UINT32_MAX)
        elif name == "request_id" and value is not None:
            _check_request_id(value)
        else:
            check_text(name, value)
        if value is not None:
            setattr(request, name, value)
    return cast("ConversationOptions", of_conversation)
