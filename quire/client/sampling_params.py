"""Sampling parameters."""

from collections.abc import Sequence
from dataclasses import dataclass

from quire.client.arguments import (
    UINT32_MAX,
    UINT64_MAX,
    check_flag,
    check_integer,
    check_number,
    check_text,
    check_token_ids,
    wrong_type,
)
from quire.v1 import inference_pb2


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
    # The default is the rest of the model's context.
    max_tokens: int | None = None
    # Texts that end the output, and are removed from it unless `include_stop_str_in_output`.
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    # Keeps the stop string that ended the output.
    include_stop_str_in_output: bool | None = None
    # Completions of the prompt, 1 to 16, each with its own random bits; the default is 1.
    n: int | None = None
    # Returns the log-probabilities of each sampled token and of this many most likely ones, 0 to
    # 20; the default returns none.
    logprobs: int | None = None
    # Returns the log-probabilities of each token of the prompt but the first, and of this many most
    # likely ones in its place, 0 to 20; the default returns none.
    prompt_logprobs: int | None = None

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
        )


def _check_stop(stop: object) -> None:
    if isinstance(stop, bytes) or not isinstance(stop, Sequence | None):
        raise wrong_type("stop", "a text or a list of texts", stop)
    for text in [stop] if isinstance(stop, str) else stop or ():
        if text is None:
            raise wrong_type("stop", "a text or a list of texts", stop)
        check_text("stop", text)
