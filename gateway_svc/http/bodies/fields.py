"""Types of the fields of HTTP requests, and how their values reach the messages."""

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from quire.v1 import inference_pb2

_UINT32_MAX = 2**32 - 1
_UINT64 = 2**64

Count = Annotated[int, Field(ge=1, le=_UINT32_MAX)]
TokenId = Annotated[int, Field(ge=0, le=_UINT32_MAX)]


class HttpRequest(BaseModel):
    """A request's body. Unknown fields and values of other types are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


def unsupported(*accepted: object) -> Any:
    """The type of a field of the API that is not served: it is refused, unless its value is null
    or one that changes nothing."""
    names = ", ".join(["null", *(repr(value) for value in accepted)])

    def check(value: object) -> object:
        # 0 is False, but `1` is not a flag.
        if value is None or any(value == one for one in accepted):
            return value
        raise PydanticCustomError(
            "unsupported", "is not supported; accepted: {accepted}", {"accepted": names}
        )

    schema = {"description": f"Not supported. Accepted: {names}."}
    return Annotated[Any, BeforeValidator(check), WithJsonSchema(schema)]


def _one_or_many(value: object) -> object:
    return [value] if isinstance(value, str) else value


class StreamOptions(HttpRequest):
    include_usage: bool | None = None
    # vLLM's: the usage so far in every chunk.
    continuous_usage_stats: bool | None = None
    # OpenAI's padding against traffic analysis.
    include_obfuscation: unsupported(False) = None  # type: ignore[valid-type]


class SamplingFields(HttpRequest):
    """Fields of completions and chat completions alike."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: Count | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=_UINT64)] | None = None
    max_tokens: Count | None = None
    stop: Annotated[list[str], BeforeValidator(_one_or_many)] | None = None
    # An opaque identifier of the client's user; it changes nothing.
    user: str | None = None

    # As vLLM has them.
    top_k: Annotated[int, Field(ge=-1, le=_UINT32_MAX)] | None = None
    min_p: float | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    # Log-probabilities of the prompt's tokens, and of this many most likely ones in their places.
    prompt_logprobs: Annotated[int, Field(ge=0, le=_UINT32_MAX)] | None = None
    # Quire's: seconds for which the request continues after its client has disconnected.
    resume_window_s: Annotated[int, Field(ge=0, le=_UINT32_MAX)] | None = None

    frequency_penalty: unsupported(0) = None  # type: ignore[valid-type]
    presence_penalty: unsupported(0) = None  # type: ignore[valid-type]
    repetition_penalty: unsupported(1) = None  # type: ignore[valid-type]
    length_penalty: unsupported(1) = None  # type: ignore[valid-type]
    logit_bias: unsupported({}) = None  # type: ignore[valid-type]
    min_tokens: unsupported(0) = None  # type: ignore[valid-type]
    use_beam_search: unsupported(False) = None  # type: ignore[valid-type]
    bad_words: unsupported([]) = None  # type: ignore[valid-type]
    allowed_token_ids: unsupported() = None  # type: ignore[valid-type]
    truncate_prompt_tokens: unsupported() = None  # type: ignore[valid-type]
    spaces_between_special_tokens: unsupported(True) = None  # type: ignore[valid-type]
    response_format: unsupported({"type": "text"}) = None  # type: ignore[valid-type]
    structured_outputs: unsupported() = None  # type: ignore[valid-type]
    return_tokens_as_token_ids: unsupported(False) = None  # type: ignore[valid-type]

    @property
    def include_usage(self) -> bool:
        options = self.stream_options
        return options is not None and bool(options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        options = self.stream_options
        return options is not None and bool(options.continuous_usage_stats)

    def sampling_params(self) -> inference_pb2.SamplingParams:
        """The parameters that are set, but log-probabilities of the output."""
        top_k, seed = self.top_k, self.seed
        return inference_pb2.SamplingParams(
            temperature=self.temperature,
            # vLLM's value for all.
            top_k=0 if top_k == -1 else top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=None if seed is None else seed % _UINT64,
            max_tokens=self.max_tokens,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            skip_special_tokens=self.skip_special_tokens,
            include_stop_str_in_output=self.include_stop_str_in_output,
            n=self.n,
            prompt_logprobs=self.prompt_logprobs,
        )


# Builds the message of one prompt; the type depends on `stream`.
GenerationMessage = inference_pb2.GenerateRequest | inference_pb2.StreamGenerateRequest
MessageType = Callable[..., GenerationMessage]


def message_type(is_stream: bool) -> MessageType:
    return inference_pb2.StreamGenerateRequest if is_stream else inference_pb2.GenerateRequest


def prompt_id(request_id: str, prompt: int) -> str:
    """The id of the generation of one prompt: the request's own for the first one."""
    return f"{request_id}-{prompt}" if prompt else request_id


def request_id_of(prompt_id: str, prompt: int) -> str:
    """The id of the request, from that of the generation of one of its prompts."""
    return prompt_id.removesuffix(f"-{prompt}") if prompt else prompt_id
