"""Validates requests and resolves their defaults. Pure; errors name the invalid field.

Fields are named by their paths in the request's proto.
"""

import hashlib
import math
from collections.abc import Sequence

from gateway_svc.generation import logits_params
from gateway_svc.generation.conversation_checks import (
    check_documents,
    check_messages,
    check_tools,
)
from gateway_svc.generation.field_checks import (
    check_at_most,
    check_is_json,
    check_length,
    check_token_ids,
    out_of_range,
)
from gateway_svc.generation.truncation import num_kept_tokens
from gateway_svc.text import chat_messages
from gateway_svc.text.chat_template import RESERVED_VARIABLES
from gateway_svc.text.served_model import ModelLimits
from quire.internal.v1 import scheduler_pb2
from quire.service.errors import invalid
from quire.v1 import conversation_pb2, inference_pb2

GenerationRequest = inference_pb2.GenerateRequest | inference_pb2.StreamGenerateRequest

# By the name in the oneof, the field with the prompt's content.
PROMPT_FIELDS = {"text": "text", "token_ids": "token_ids.ids", "conversation": "conversation"}
MAX_REQUEST_ID_CHARACTERS = 128
MAX_CHOICES = 16
MAX_TOP_LOGPROBS = 20
# Of the prompt and all choices together, so that a whole response fits into one message, to the
# client and from the scheduler.
MAX_LOGPROBS = 2**20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKEN_IDS = 256
MAX_CACHE_SALT_BYTES = 256
MAX_VARIABLES_BYTES = 2**14
# Of one Detokenize call, unless the model's sequences are longer: a tenth of a second of work.
MAX_DETOKENIZED_TOKENS = 2**17


def check_request(request: GenerationRequest, limits: ModelLimits) -> None:
    """Check all that does not depend on the prompt's tokens."""
    if request.HasField("request_id"):
        check_request_id(request.request_id)
    salt_bytes = len(request.cache_salt.encode())
    check_at_most("cache_salt", "CACHE_SALT_LENGTH", salt_bytes, MAX_CACHE_SALT_BYTES, "bytes")
    params = request.sampling_params
    _check_sampling(params, limits.vocab_size)
    _check_prompt(request, limits)
    if _omits_text(params) and chat_messages.offers_tools(request.conversation):
        raise invalid(
            "sampling_params.detokenize",
            "TOOLS_WITHOUT_TEXT",
            "is false, and calls of tools are read from the text; set tool_choice to none",
        )


def check_resume_request(request: inference_pb2.ResumeGenerateRequest) -> None:
    """Check all that does not depend on the state of the request."""
    check_request_id(request.request_id)
    count = len(request.next_token_indices)
    if count > MAX_CHOICES:
        raise invalid(
            "next_token_indices",
            "TOO_MANY_NEXT_TOKEN_INDICES",
            f"has {count} entries; a request has at most {MAX_CHOICES} choices",
        )


def check_request_id(request_id: str) -> None:
    check_length("request_id", "REQUEST_ID_LENGTH", request_id, MAX_REQUEST_ID_CHARACTERS)
    at = next((at for at, one in enumerate(request_id) if not "!" <= one <= "~"), None)
    if at is not None:
        raise invalid(
            "request_id",
            "REQUEST_ID_CHARACTERS",
            f"has U+{ord(request_id[at]):04X} at character {at}; printable ASCII characters other "
            "than the space are allowed",
        )


def check_resume_window(window_s: int, maximum_s: int) -> None:
    if window_s > maximum_s:
        raise out_of_range("resume_window_s", window_s, f"0 to {maximum_s}")


def check_conversation(conversation: conversation_pb2.Conversation, limits: ModelLimits) -> None:
    if not limits.has_chat_template:
        raise invalid(
            "conversation", "NO_CHAT_TEMPLATE", "is a conversation; the model has no chat template"
        )
    check_messages(conversation)
    check_tools(conversation)
    check_documents(conversation)
    _check_template_variables(conversation)
    texts = [message.content + message.reasoning for message in conversation.messages]
    texts += [one.text for document in conversation.documents for one in document.fields]
    check_text("conversation", "".join(texts), limits)


def check_text(field: str, text: str, limits: ModelLimits) -> None:
    """Refuse text too long for any tokenization: tokenizing it would take seconds."""
    maximum = limits.max_model_len * limits.longest_token
    if len(text) > maximum:
        raise invalid(
            field,
            "PROMPT_TOO_LONG",
            f"has {len(text)} characters. {_context(limits.max_model_len)}, which hold at most "
            f"{maximum} characters",
        )


def check_detokenize(token_ids: Sequence[int], limits: ModelLimits) -> None:
    maximum = max(MAX_DETOKENIZED_TOKENS, limits.max_model_len)
    check_at_most("token_ids", "TOO_MANY_TOKEN_IDS", len(token_ids), maximum)
    check_token_ids("token_ids", token_ids, limits.vocab_size)


def check_prompt_length(field: str, num_tokens: int, max_model_len: int) -> None:
    """A prompt has at least one token, and leaves room for at least one."""
    if num_tokens < 1:
        raise invalid(field, "EMPTY_PROMPT", "has 0 tokens; at least 1 is needed")
    if num_tokens >= max_model_len:
        raise invalid(
            field,
            "PROMPT_TOO_LONG",
            f"has {num_tokens} tokens. {_context(max_model_len)}, at most {max_model_len - 1} of "
            "the prompt",
        )


def _context(max_model_len: int) -> str:
    """In OpenAI's words, which clients search the message for."""
    return f"This model's maximum context length is {max_model_len} tokens"


def resolve(
    params: inference_pb2.SamplingParams,
    request_id: str,
    num_prompt_tokens: int,
    limits: ModelLimits,
) -> scheduler_pb2.ResolvedParams:
    """Fill in the defaults of validated parameters; max_tokens is capped by the context's room."""
    room = limits.max_model_len - num_prompt_tokens
    eos_token_ids = () if params.ignore_eos else limits.eos_token_ids
    num_top = min(params.logprobs, limits.vocab_size)
    return scheduler_pb2.ResolvedParams(
        temperature=params.temperature if params.HasField("temperature") else 1.0,
        top_k=params.top_k,
        top_p=params.top_p if params.HasField("top_p") else 1.0,
        seed=params.seed if params.HasField("seed") else _seed(request_id),
        max_tokens=min(params.max_tokens, room) if params.HasField("max_tokens") else room,
        stop_token_ids=sorted({*eos_token_ids, *params.stop_token_ids}),
        # The token itself, beside the most likely ones.
        num_logprobs=num_top + 1 if params.HasField("logprobs") else 0,
        num_prompt_logprobs=(
            min(params.prompt_logprobs, limits.vocab_size) + 1
            if params.HasField("prompt_logprobs")
            else 0
        ),
        min_p=params.min_p,
        without_drafts=params.HasField("speculation") and not params.speculation,
    )


def limit_logprobs(
    resolved: scheduler_pb2.ResolvedParams,
    params: inference_pb2.SamplingParams,
    num_choices: int,
    num_prompt_tokens: int,
) -> None:
    """Refuse more log-probabilities than a response can hold. The default of `max_tokens` is
    lowered instead, as the client does not know it."""
    most = MAX_LOGPROBS - num_prompt_tokens * resolved.num_prompt_logprobs
    if most < 0:
        raise invalid(
            "sampling_params.prompt_logprobs",
            "TOO_MANY_LOGPROBS",
            f"is {resolved.num_prompt_logprobs - 1}; a prompt of {num_prompt_tokens} tokens "
            f"allows at most {MAX_LOGPROBS // num_prompt_tokens - 1}",
        )
    max_tokens = most // (max(resolved.num_logprobs, 1) * num_choices)
    if not resolved.num_logprobs or resolved.max_tokens <= max_tokens:
        return
    if max_tokens and not params.HasField("max_tokens"):
        resolved.max_tokens = max_tokens
        return
    raise invalid(
        "sampling_params.max_tokens",
        "TOO_MANY_LOGPROBS",
        f"is {params.max_tokens or resolved.max_tokens}; with logprobs = "
        f"{resolved.num_logprobs - 1} and n = {num_choices} at most {max_tokens} is allowed",
    )


def _seed(request_id: str) -> int:
    return int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:8], "big")


def _check_prompt(request: GenerationRequest, limits: ModelLimits) -> None:
    match request.WhichOneof("prompt"):
        case None:
            raise invalid("text", "NO_PROMPT", "is missing; set text, token_ids or conversation")
        case "text":
            if not request.text:
                raise invalid("text", "EMPTY_PROMPT", "has 0 characters; at least 1 is needed")
            check_text("text", request.text, limits)
        case "token_ids":
            field, token_ids = PROMPT_FIELDS["token_ids"], request.token_ids.ids
            num_tokens = num_kept_tokens(
                len(token_ids), request.sampling_params, limits.max_model_len
            )
            check_prompt_length(field, num_tokens, limits.max_model_len)
            check_token_ids(field, token_ids, limits.vocab_size)
        case "conversation":
            check_conversation(request.conversation, limits)


def _check_template_variables(conversation: conversation_pb2.Conversation) -> None:
    field = "conversation.chat_template_kwargs"
    variables = conversation.chat_template_kwargs
    num_bytes = variables.ByteSize()
    check_at_most(field, "TEMPLATE_VARIABLES_SIZE", num_bytes, MAX_VARIABLES_BYTES, "bytes")
    check_is_json(field, variables)
    for name in variables.fields:
        if name in RESERVED_VARIABLES:
            raise invalid(f"{field}.{name}", "RESERVED_VARIABLE", "is set by the server")


def _check_sampling(params: inference_pb2.SamplingParams, vocab_size: int) -> None:
    if not (math.isfinite(params.temperature) and params.temperature >= 0):
        raise out_of_range(
            "sampling_params.temperature", params.temperature, "0 or more, and finite"
        )
    if params.HasField("top_p") and not 0 < params.top_p <= 1:
        raise out_of_range("sampling_params.top_p", params.top_p, "above 0 and at most 1")
    if not 0 <= params.min_p <= 1:
        raise out_of_range("sampling_params.min_p", params.min_p, "0 to 1")
    if params.HasField("max_tokens") and params.max_tokens < 1:
        raise out_of_range("sampling_params.max_tokens", params.max_tokens, "at least 1")
    if params.HasField("n") and not 1 <= params.n <= MAX_CHOICES:
        raise out_of_range("sampling_params.n", params.n, f"1 to {MAX_CHOICES}")
    if params.logprobs > MAX_TOP_LOGPROBS:
        raise out_of_range("sampling_params.logprobs", params.logprobs, f"0 to {MAX_TOP_LOGPROBS}")
    if (count := params.prompt_logprobs) > MAX_TOP_LOGPROBS:
        raise out_of_range("sampling_params.prompt_logprobs", count, f"0 to {MAX_TOP_LOGPROBS}")
    if params.HasField("truncate_prompt_tokens") and params.truncate_prompt_tokens < 1:
        raise out_of_range(
            "sampling_params.truncate_prompt_tokens", params.truncate_prompt_tokens, "at least 1"
        )
    _check_stops(params, vocab_size)
    logits_params.check(params, vocab_size)


def _omits_text(params: inference_pb2.SamplingParams) -> bool:
    return params.HasField("detokenize") and not params.detokenize


def _check_stops(params: inference_pb2.SamplingParams, vocab_size: int) -> None:
    field = "sampling_params.stop"
    if params.stop and _omits_text(params):
        raise invalid(
            field, "STOP_WITHOUT_TEXT", "is set; there is no text with detokenize = false"
        )
    check_at_most(field, "TOO_MANY_STOP", len(params.stop), MAX_STOP_STRINGS)
    for at, stop in enumerate(params.stop):
        check_length(f"{field}[{at}]", "STOP_STRING_LENGTH", stop, MAX_STOP_CHARACTERS)
    field = "sampling_params.stop_token_ids"
    check_at_most(field, "TOO_MANY_STOP_TOKEN_IDS", len(params.stop_token_ids), MAX_STOP_TOKEN_IDS)
    check_token_ids(field, params.stop_token_ids, vocab_size)
