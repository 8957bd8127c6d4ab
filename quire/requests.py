"""Between the caller's words and the protocol's: requests from arguments, outputs from answers."""

from typing import TypedDict, TypeVar

from quire.outputs import CompletionOutput, RequestOutput, Usage
from quire.prompts import Conversation, Prompt, conversation_proto, is_conversation, token_ids_proto
from quire.sampling import SamplingParams
from quire.v1 import inference_pb2, tokenizer_pb2

_Request = TypeVar("_Request", inference_pb2.GenerateRequest, inference_pb2.StreamGenerateRequest)


class RequestOptions(TypedDict, total=False):
    """What a request may say beside its prompt and its sampling."""

    # The caller's name for the request; the server gives a random one.
    request_id: str
    # The served model's name; may be absent where one model is served.
    model: str | None
    # Keeps the request's cached prefixes apart from those of other salts.
    cache_salt: str


def fill_request(
    request: _Request,
    prompt: Prompt,
    sampling_params: SamplingParams | None,
    options: RequestOptions,
) -> _Request:
    """Writes what the caller said into an empty request.

    TypeError or ValueError for what no message can carry.
    """
    for name, value in options.items():
        if value is not None:
            setattr(request, name, value)
    if sampling_params is not None:
        request.sampling_params.CopyFrom(sampling_params.to_proto())
    if isinstance(prompt, str):
        request.text = prompt
    elif is_conversation(prompt):
        request.conversation.CopyFrom(conversation_proto(prompt))
    else:
        request.token_ids.CopyFrom(token_ids_proto(prompt))
    return request


def request_output(
    request: inference_pb2.GenerateRequest, response: inference_pb2.GenerateResponse
) -> RequestOutput:
    """An answer together with the prompt it answers."""
    return RequestOutput(
        request_id=response.request_id,
        model=response.model,
        prompt=request.text if request.HasField("text") else None,
        prompt_token_ids=list(request.token_ids.ids) if request.HasField("token_ids") else None,
        outputs=[CompletionOutput.from_proto(choice) for choice in response.choices],
        usage=Usage.from_proto(response.usage),
    )


def tokenize_request(
    prompt: str | Conversation, add_special_tokens: bool | None, model: str | None
) -> tokenizer_pb2.TokenizeRequest:
    request = tokenizer_pb2.TokenizeRequest(model=model, add_special_tokens=add_special_tokens)
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.conversation.CopyFrom(conversation_proto(prompt))
    return request
