"""What a request must be. Pure: request in, resolved parameters or the field at fault out.

Fields are named as in the proto; `prompt` stands for the oneof.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from google.protobuf.wrappers_pb2 import FloatValue

from quire.internal.v1 import scheduler_pb2
from quire.service.errors import RequestError, invalid
from quire.v1 import inference_pb2

GenerationRequest = inference_pb2.GenerateRequest | inference_pb2.StreamGenerateRequest

MAX_REQUEST_ID_CHARACTERS = 128
MAX_CHOICES = 16
MAX_TOP_LOGPROBS = 20
# Of all choices together, so that a whole answer fits into one message, here and to the scheduler.
MAX_LOGPROBS = 2**20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKEN_IDS = 256
MAX_CACHE_SALT_BYTES = 256
MAX_MESSAGES = 4096
MAX_ROLE_CHARACTERS = 64
MAX_RESUME_WINDOW_S = 3600
# Of one Detokenize, unless the model's own sequences are longer: a tenth of a second of work.
MAX_DETOKENIZED_TOKENS = 2**17


@dataclass(frozen=True)
class ModelLimits:
    """What of a model bounds its requests."""

    vocab_size: int
    # Prompt and output together, in tokens.
    max_model_len: int
    # The most characters that one token stands for.
    longest_token: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool


def check_request(request: GenerationRequest, limits: ModelLimits) -> None:
    """Everything that can be known before the prompt is tokenized."""
    if request.HasField("request_id"):
        check_request_id(request.request_id)
    _check_cache_salt(request.cache_salt)
    if request.resume_window_s > MAX_RESUME_WINDOW_S:
        raise invalid(
            "resume_window_s",
            "RESUME_WINDOW_S_OUT_OF_RANGE",
            f"is {request.resume_window_s}; must be 0 to {MAX_RESUME_WINDOW_S}",
        )
    _check_sampling(request.sampling_params, limits.vocab_size)
    _check_prompt(request, limits)


def check_resumed(request: inference_pb2.ResumeGenerateRequest) -> None:
    """Everything that can be known before the request is known."""
    check_request_id(request.request_id)
    count = len(request.next_token_indices)
    if count > MAX_CHOICES:
        raise invalid(
            "next_token_indices",
            "TOO_MANY_NEXT_TOKEN_INDICES",
            f"has {count} entries; a request has at most {MAX_CHOICES} choices",
        )


def check_request_id(request_id: str) -> None:
    if not 1 <= len(request_id) <= MAX_REQUEST_ID_CHARACTERS:
        raise invalid(
            "request_id",
            "REQUEST_ID_LENGTH",
            f"has {len(request_id)} characters; 1 to {MAX_REQUEST_ID_CHARACTERS} are allowed",
        )


def check_conversation(
    field: str, conversation: inference_pb2.Conversation, limits: ModelLimits
) -> None:
    if not limits.has_chat_template:
        raise invalid(
            field, "NO_CHAT_TEMPLATE", "is a conversation; the model has no chat template"
        )
    if not conversation.messages:
        raise invalid(field, "EMPTY_CONVERSATION", "has no messages; at least 1 is needed")
    # Before anything is done per message: millions of empty ones fit into a request.
    if len(conversation.messages) > MAX_MESSAGES:
        raise invalid(
            f"{field}.messages",
            "TOO_MANY_MESSAGES",
            f"has {len(conversation.messages)} entries; at most {MAX_MESSAGES} are allowed",
        )
    for at, message in enumerate(conversation.messages):
        if len(message.role) > MAX_ROLE_CHARACTERS:
            raise invalid(
                f"{field}.messages[{at}].role",
                "ROLE_LENGTH",
                f"has {len(message.role)} characters; at most {MAX_ROLE_CHARACTERS} are allowed",
            )
    check_text(field, "".join(message.content for message in conversation.messages), limits)


def check_text(field: str, text: str, limits: ModelLimits) -> None:
    """Refuses what cannot fit however it is tokenized, for tokenizing it would cost seconds."""
    most = limits.max_model_len * limits.longest_token
    if len(text) > most:
        raise invalid(
            field,
            "PROMPT_TOO_LONG",
            f"has {len(text)} characters; the model's {limits.max_model_len} tokens "
            f"hold at most {most}",
        )


def check_detokenized(token_ids: Sequence[int], limits: ModelLimits) -> None:
    most = max(MAX_DETOKENIZED_TOKENS, limits.max_model_len)
    if len(token_ids) > most:
        raise invalid(
            "token_ids",
            "TOO_MANY_TOKEN_IDS",
            f"has {len(token_ids)} entries; at most {most} are allowed",
        )
    check_token_ids("token_ids", token_ids, limits.vocab_size)


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if not token_ids or max(token_ids) < vocab_size:
        return
    at, id_ = next((at, id_) for at, id_ in enumerate(token_ids) if id_ >= vocab_size)
    raise invalid(
        f"{field}[{at}]",
        "TOKEN_ID_OUTSIDE_VOCABULARY",
        f"is {id_}; token ids are 0 to {vocab_size - 1}",
    )


def check_prompt_length(num_tokens: int, max_model_len: int) -> None:
    """A prompt has a token, and leaves room for one."""
    if num_tokens < 1:
        raise invalid("prompt", "EMPTY_PROMPT", "has 0 tokens; at least 1 is needed")
    if num_tokens >= max_model_len:
        raise invalid(
            "prompt",
            "PROMPT_TOO_LONG",
            f"has {num_tokens} tokens; at most {max_model_len - 1} are allowed, "
            f"for the model's {max_model_len} hold at least 1 of output",
        )


def template_refusal(field: str, reason: str) -> RequestError:
    return invalid(field, "CHAT_TEMPLATE_REFUSES", f"does not suit the chat template: {reason}")


def resolve(
    params: inference_pb2.SamplingParams,
    request_id: str,
    num_prompt_tokens: int,
    limits: ModelLimits,
) -> scheduler_pb2.ResolvedParams:
    """Every default filled in, of checked parameters; max_tokens is cut to what the context has."""
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
        # Beside the most likely ones the token itself.
        num_logprobs=num_top + 1 if params.HasField("logprobs") else 0,
        min_p=params.min_p,
    )


def check_num_logprobs(resolved: scheduler_pb2.ResolvedParams, num_choices: int) -> None:
    """Refuses more of them than an answer can hold."""
    most_tokens = MAX_LOGPROBS // (max(resolved.num_logprobs, 1) * num_choices)
    if resolved.num_logprobs and resolved.max_tokens > most_tokens:
        raise invalid(
            "sampling_params.max_tokens",
            "TOO_MANY_LOGPROBS",
            f"is {resolved.max_tokens}, if only because the model's context has so much left; with "
            f"logprobs = {resolved.num_logprobs - 1} and n = {num_choices} at most {most_tokens} "
            "is allowed",
        )


def _seed(request_id: str) -> int:
    return int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:8], "big")


def _check_cache_salt(cache_salt: str) -> None:
    num_bytes = len(cache_salt.encode())
    if num_bytes > MAX_CACHE_SALT_BYTES:
        raise invalid(
            "cache_salt",
            "CACHE_SALT_LENGTH",
            f"has {num_bytes} bytes; at most {MAX_CACHE_SALT_BYTES} are allowed",
        )


def _check_prompt(request: GenerationRequest, limits: ModelLimits) -> None:
    match request.WhichOneof("prompt"):
        case None:
            raise invalid("prompt", "NO_PROMPT", "is missing; text, token_ids or conversation")
        case "text":
            if not request.text:
                raise invalid("prompt", "EMPTY_PROMPT", "has 0 characters; at least 1 is needed")
            check_text("prompt", request.text, limits)
        case "token_ids":
            check_prompt_length(len(request.token_ids.ids), limits.max_model_len)
            check_token_ids("prompt.token_ids", request.token_ids.ids, limits.vocab_size)
        case "conversation":
            check_conversation("prompt.conversation", request.conversation, limits)


def _check_sampling(params: inference_pb2.SamplingParams, vocab_size: int) -> None:
    if not (math.isfinite(params.temperature) and params.temperature >= 0):
        raise _sampling("temperature", params.temperature, "0 or more, and finite")
    if params.HasField("top_p") and not 0 < params.top_p <= 1:
        raise _sampling("top_p", params.top_p, "above 0 and at most 1")
    if not 0 <= params.min_p <= 1:
        raise _sampling("min_p", params.min_p, "0 to 1")
    if params.HasField("max_tokens") and params.max_tokens < 1:
        raise _sampling("max_tokens", params.max_tokens, "at least 1")
    if params.HasField("n") and not 1 <= params.n <= MAX_CHOICES:
        raise _sampling("n", params.n, f"1 to {MAX_CHOICES}")
    if params.logprobs > MAX_TOP_LOGPROBS:
        raise _sampling("logprobs", params.logprobs, f"0 to {MAX_TOP_LOGPROBS}")
    _check_stops(params.stop)
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise _too_many("stop_token_ids", len(params.stop_token_ids), MAX_STOP_TOKEN_IDS)
    check_token_ids("sampling_params.stop_token_ids", params.stop_token_ids, vocab_size)


def _check_stops(stops: Sequence[str]) -> None:
    if len(stops) > MAX_STOP_STRINGS:
        raise _too_many("stop", len(stops), MAX_STOP_STRINGS)
    for at, stop in enumerate(stops):
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise invalid(
                f"sampling_params.stop[{at}]",
                "STOP_STRING_LENGTH",
                f"has {len(stop)} characters; 1 to {MAX_STOP_CHARACTERS} are allowed",
            )


def _sampling(name: str, value: float, allowed: str) -> RequestError:
    return invalid(
        f"sampling_params.{name}",
        f"{name.upper()}_OUT_OF_RANGE",
        f"is {_shortest(value)}; must be {allowed}",
    )


def _shortest(value: float) -> str:
    """The fewest digits that no other number of 32 bits has; what the client wrote, most likely."""
    texts = (f"{value:.{digits}g}" for digits in range(6, 10))
    same = (text for text in texts if FloatValue(value=float(text)).value == value)
    return next(same, str(value))


def _too_many(name: str, count: int, most: int) -> RequestError:
    return invalid(
        f"sampling_params.{name}",
        f"TOO_MANY_{name.upper()}",
        f"has {count} entries; at most {most} are allowed",
    )
