"""Fields of completions and chat completions alike."""

from typing import Annotated, Literal

from pydantic import Field

from gateway_svc.generation.beam_search import Search
from gateway_svc.http.bodies.fields import (
    UINT32_MAX,
    Count,
    HttpRequest,
    Texts,
    TokenIds,
    replaced_by,
    unsupported,
)
from gateway_svc.http.bodies.generation_fields import GenerationFields
from gateway_svc.http.bodies.structured import FORMAT_NAMES, OutputFormat, StructuredOutputs
from quire.service.errors import invalid
from quire.v1 import beam_search_pb2, inference_pb2, structured_output_pb2

_EARLY_STOPPING = {
    None: beam_search_pb2.EARLY_STOPPING_UNSPECIFIED,
    False: beam_search_pb2.EARLY_STOPPING_HEURISTIC,
    True: beam_search_pb2.EARLY_STOPPING_ALWAYS,
    "never": beam_search_pb2.EARLY_STOPPING_NEVER,
}


class StreamOptions(HttpRequest):
    include_usage: bool | None = None
    # vLLM's: the usage so far in every chunk.
    continuous_usage_stats: bool | None = None
    # OpenAI's padding against traffic analysis.
    include_obfuscation: unsupported(False) = None  # type: ignore[valid-type]


class SamplingFields(GenerationFields):
    """Fields of completions and chat completions alike."""

    stream_options: StreamOptions | None = None
    n: Count | None = None
    max_tokens: Count | None = None
    stop: str | Texts | None = None
    # An opaque identifier of the client's user; it changes nothing.
    user: str | None = None

    # As vLLM has them.
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = None
    # False: choices have no text.
    detokenize: bool | None = None
    # Log-probabilities of the prompt's tokens, and of this many most likely ones in their places.
    prompt_logprobs: Annotated[int, Field(ge=0, le=UINT32_MAX)] | None = None
    # Quire's: seconds for which the request continues after its client has disconnected.
    resume_window_s: Annotated[int, Field(ge=0, le=UINT32_MAX)] | None = None

    # Beam search, as vLLM has it: `n` is the number of beams, which are sent at the end.
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    # transformers' values, as vLLM had them.
    early_stopping: bool | Literal["never"] | None = None

    # Formats of the output: OpenAI's field, and vLLM's.
    response_format: OutputFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    guided_json: replaced_by("structured_outputs.json") = None  # type: ignore[valid-type]
    guided_regex: replaced_by("structured_outputs.regex") = None  # type: ignore[valid-type]
    guided_choice: replaced_by("structured_outputs.choice") = None  # type: ignore[valid-type]
    guided_grammar: replaced_by("structured_outputs.grammar") = None  # type: ignore[valid-type]
    guided_json_object: replaced_by("structured_outputs.json_object") = None  # type: ignore[valid-type]
    guided_decoding_backend: unsupported() = None  # type: ignore[valid-type]
    guided_whitespace_pattern: unsupported() = None  # type: ignore[valid-type]
    structural_tag: replaced_by("structured_outputs.structural_tag") = None  # type: ignore[valid-type]
    spaces_between_special_tokens: unsupported(True) = None  # type: ignore[valid-type]
    return_tokens_as_token_ids: unsupported(False) = None  # type: ignore[valid-type]
    # vLLM's: clients of it send the neutral values, too.
    kv_transfer_params: unsupported({}) = None  # type: ignore[valid-type]
    logits_processors: unsupported([]) = None  # type: ignore[valid-type]
    logprob_token_ids: unsupported() = None  # type: ignore[valid-type]
    mm_processor_kwargs: unsupported({}) = None  # type: ignore[valid-type]
    repetition_detection: unsupported() = None  # type: ignore[valid-type]
    request_id: replaced_by("the header X-Request-Id") = None  # type: ignore[valid-type]
    thinking_token_budget: unsupported() = None  # type: ignore[valid-type]
    # The last tokens of a prompt are kept.
    truncation_side: unsupported("left") = None  # type: ignore[valid-type]

    @property
    def search(self) -> Search | None:
        """The parameters of a beam search. RequestError if there is none and they are set."""
        if self.use_beam_search:
            return Search.of(
                beam_search_pb2.BeamSearchParams(
                    beam_width=self.n or 1,
                    length_penalty=self.length_penalty,
                    early_stopping=_EARLY_STOPPING[self.early_stopping],
                )
            )
        for name, neutral in (("length_penalty", 1), ("early_stopping", False)):
            if (value := getattr(self, name)) is not None and value != neutral:
                raise invalid(
                    name, "NO_BEAM_SEARCH", "is accepted only with use_beam_search = true"
                )
        return None

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
        params = inference_pb2.SamplingParams(
            max_tokens=self.max_tokens,
            stop=[self.stop] if isinstance(self.stop, str) else self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            skip_special_tokens=self.skip_special_tokens,
            include_stop_str_in_output=self.include_stop_str_in_output,
            n=self.n,
            prompt_logprobs=self.prompt_logprobs,
            detokenize=self.detokenize,
            structured_output=self._structured_output(),
        )
        self.fill_params(params)
        return params

    @property
    def format_names(self) -> dict[str, str]:
        """The client's names of the fields of a format, for errors."""
        return FORMAT_NAMES.get(self.format_field, {})

    @property
    def format_field(self) -> str:
        """The field with a format; empty if there is none."""
        if self.response_format is not None and self.response_format.type != "text":
            has_value = self.response_format.value is not None
            return "response_format.value" if has_value else "response_format"
        return "" if self.structured_outputs is None else "structured_outputs"

    def _structured_output(self) -> structured_output_pb2.StructuredOutput | None:
        requested = None if self.response_format is None else self.response_format.to_proto()
        if self.structured_outputs is None:
            return requested
        if requested is not None:
            raise invalid("structured_outputs", "TWO_FORMATS", "is set, and so is response_format")
        return self.structured_outputs.to_proto()
