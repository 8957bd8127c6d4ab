"""Sampling parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from quire.client.arguments import (
    UINT32_MAX,
    UINT64_MAX,
    check_flag,
    check_integer,
    check_number,
    check_text,
    check_texts,
    check_token_ids,
    to_struct,
    wrong_type,
)
from quire.client.structured_output import StructuredOutput
from quire.v1 import beam_search_pb2, inference_pb2

_MODES = {
    None: inference_pb2.LOGPROBS_MODE_UNSPECIFIED,
    "raw": inference_pb2.LOGPROBS_MODE_RAW,
    "processed": inference_pb2.LOGPROBS_MODE_PROCESSED,
}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters; None selects the server's default.

    The server validates values. TypeError or ValueError here only if a message cannot contain them.
    """

    # 0 takes the most likely token; the server's default is 1.
    temperature: float | None = None
    # Tokens considered, most likely first; 0, the default, considers all.
    top_k: int | None = None
    # Probability mass considered, in (0, 1]; the default is 1.
    top_p: float | None = None
    # Considers tokens whose probability is at least this share of the highest; 0, the default,
    # considers all.
    min_p: float | None = None
    # Equal seeds give equal random bits; the default derives from the request's id.
    seed: int | None = None
    # The default is the rest of the model's context, or less where `logprobs` allows less.
    max_tokens: int | None = None
    # Texts that end the output, and are removed from it unless `include_stop_str_in_output`.
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    # Keeps the stop string or stop token that ended the output.
    include_stop_str_in_output: bool | None = None
    # Completions of the prompt, 1 to 16, each with its own random bits; the default is 1.
    n: int | None = None
    # Returns the log-probabilities of each sampled token and of this many most likely ones, 0 to
    # 20; the default returns none.
    logprobs: int | None = None
    # Returns the log-probabilities of each token of the prompt but the first, and of this many most
    # likely ones in its place, 0 to 20; the default returns none.
    prompt_logprobs: int | None = None
    # Subtracted from the logits of tokens that the output has, -2 to 2; the default is 0.
    presence_penalty: float | None = None
    # The same for each of a token's occurrences in the output.
    frequency_penalty: float | None = None
    # Divides positive logits of tokens that prompt or output have, and multiplies negative ones;
    # above 0, the default is 1.
    repetition_penalty: float | None = None
    # Stop tokens are impossible, and stop strings ignored, before so many tokens; the default is 0.
    min_tokens: int | None = None
    # Added to the logits of these tokens, -100 to 100.
    logit_bias: Mapping[int, float] | None = None
    # Only these tokens are possible.
    allowed_token_ids: Sequence[int] | None = None
    # Texts that the output must not have, compared token by token.
    bad_words: Sequence[str] | None = None
    # Considers the tokens whose information content is closest to the expected one, up to this
    # probability mass, in (0, 1]; the default is 1.
    typical_p: float | None = None
    # Only so many tokens of the prompt, the last ones, are used; -1: as many as the context takes.
    truncate_prompt_tokens: int | None = None
    # False: the output has token ids and no text.
    detokenize: bool | None = None
    # False: no tokens of the output are drafted (speculative decoding), which changes no token.
    speculation: bool | None = None
    # Which distribution `logprobs` describe: the model's own, the default, or the one after
    # penalties, biases and masks.
    logprobs_mode: Literal["raw", "processed"] | None = None
    # A format that the output follows.
    structured_output: StructuredOutput | None = None
    # Arguments of the server's own logits processors, by their names.
    processor_args: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature)
        check_integer("top_k", self.top_k, UINT32_MAX)
        check_number("top_p", self.top_p)
        check_number("min_p", self.min_p)
        check_integer("seed", self.seed, UINT64_MAX)
        check_integer("max_tokens", self.max_tokens, UINT32_MAX)
        _check_stop(self.stop)
        check_token_ids("stop_token_ids", self.stop_token_ids)
        check_flag("ignore_eos", self.ignore_eos)
        check_flag("skip_special_tokens", self.skip_special_tokens)
        check_flag("include_stop_str_in_output", self.include_stop_str_in_output)
        check_integer("n", self.n, UINT32_MAX)
        check_integer("logprobs", self.logprobs, UINT32_MAX)
        check_integer("prompt_logprobs", self.prompt_logprobs, UINT32_MAX)
        check_number("presence_penalty", self.presence_penalty)
        check_number("frequency_penalty", self.frequency_penalty)
        check_number("repetition_penalty", self.repetition_penalty)
        check_integer("min_tokens", self.min_tokens, UINT32_MAX)
        _check_bias(self.logit_bias)
        check_token_ids("allowed_token_ids", self.allowed_token_ids)
        check_texts("bad_words", self.bad_words)
        check_number("typical_p", self.typical_p)
        check_integer("truncate_prompt_tokens", self.truncate_prompt_tokens, UINT32_MAX, -1)
        check_flag("detokenize", self.detokenize)
        check_flag("speculation", self.speculation)
        if not isinstance(self.logprobs_mode, str | None) or self.logprobs_mode not in _MODES:
            raise wrong_type("logprobs_mode", "'raw' or 'processed'", self.logprobs_mode)
        if not isinstance(self.structured_output, StructuredOutput | None):
            raise wrong_type("structured_output", "a StructuredOutput", self.structured_output)
        to_struct("processor_args", self.processor_args)

    def to_proto(self) -> inference_pb2.SamplingParams:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        return inference_pb2.SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            max_tokens=self.max_tokens,
            stop=stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            skip_special_tokens=self.skip_special_tokens,
            include_stop_str_in_output=self.include_stop_str_in_output,
            n=self.n,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            min_tokens=self.min_tokens,
            logit_bias=self.logit_bias,
            allowed_token_ids=(
                None
                if self.allowed_token_ids is None
                else inference_pb2.TokenIds(ids=self.allowed_token_ids)
            ),
            bad_words=self.bad_words,
            typical_p=self.typical_p,
            # Any number that the context does not have room for stands for as many as it has.
            truncate_prompt_tokens=(
                UINT32_MAX if self.truncate_prompt_tokens == -1 else self.truncate_prompt_tokens
            ),
            detokenize=self.detokenize,
            speculation=self.speculation,
            logprobs_mode=_MODES[self.logprobs_mode],
            structured_output=(
                None if self.structured_output is None else self.structured_output.to_proto()
            ),
            processor_args=to_struct("processor_args", self.processor_args),
        )


EarlyStopping: TypeAlias = bool | Literal["never"]

_EARLY_STOPPING: dict[EarlyStopping | None, beam_search_pb2.EarlyStopping.ValueType] = {
    None: beam_search_pb2.EARLY_STOPPING_UNSPECIFIED,
    False: beam_search_pb2.EARLY_STOPPING_HEURISTIC,
    True: beam_search_pb2.EARLY_STOPPING_ALWAYS,
    "never": beam_search_pb2.EARLY_STOPPING_NEVER,
}


@dataclass(frozen=True)
class BeamSearchParams:
    """How a prompt is continued by beam search; None stands for the server's default.

    TypeError or ValueError for a value that a request cannot contain.
    """

    # Beams, and sequences of the output, 1 to 16; the default is 4.
    beam_width: int | None = None
    # At least 1; the default and upper bound is the room left in the model's context.
    max_tokens: int | None = None
    # A score is a cumulative log-probability, divided by the number of tokens to this power: above
    # 0 longer sequences are preferred; -10 to 10, the default is 1.
    length_penalty: float | None = None
    # When a search ends that has as many ended sequences as beams. True: at once. False, the
    # default: when the best beam, at its present length, is not better than the worst of them.
    # "never": when no beam can become better than the worst of them.
    early_stopping: EarlyStopping | None = None
    # Token ids that end a sequence, in addition to the model's end-of-sequence ids.
    stop_token_ids: list[int] | None = None
    # Continues past end-of-sequence tokens; the default is False.
    ignore_eos: bool | None = None
    # Leaves special tokens out of the text; the default is True.
    skip_special_tokens: bool | None = None

    def __post_init__(self) -> None:
        check_integer("beam_width", self.beam_width, UINT32_MAX)
        check_integer("max_tokens", self.max_tokens, UINT32_MAX)
        check_number("length_penalty", self.length_penalty)
        if self.early_stopping not in (None, "never") and not isinstance(self.early_stopping, bool):
            raise wrong_type("early_stopping", "True, False or 'never'", self.early_stopping)
        check_token_ids("stop_token_ids", self.stop_token_ids)
        check_flag("ignore_eos", self.ignore_eos)
        check_flag("skip_special_tokens", self.skip_special_tokens)

    def to_proto(self) -> beam_search_pb2.BeamSearchParams:
        return beam_search_pb2.BeamSearchParams(
            beam_width=self.beam_width,
            max_tokens=self.max_tokens,
            length_penalty=self.length_penalty,
            early_stopping=_EARLY_STOPPING[self.early_stopping],
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            skip_special_tokens=self.skip_special_tokens,
        )


def _check_bias(biases: object) -> None:
    if biases is None:
        return
    if not isinstance(biases, Mapping):
        raise wrong_type("logit_bias", "an object of numbers by token id", biases)
    for token_id, bias in biases.items():
        if token_id is None or bias is None:
            raise wrong_type(f"logit_bias[{token_id}]", "a number by a token id", bias)
        check_integer(f"logit_bias[{token_id!r}]", token_id, UINT32_MAX)
        check_number(f"logit_bias[{token_id}]", bias)


def _check_stop(stop: object) -> None:
    if isinstance(stop, bytes) or not isinstance(stop, Sequence | None):
        raise wrong_type("stop", "a text or a list of texts", stop)
    for text in [stop] if isinstance(stop, str) else stop or ():
        if text is None:
            raise wrong_type("stop", "a text or a list of texts", stop)
        check_text("stop", text)
