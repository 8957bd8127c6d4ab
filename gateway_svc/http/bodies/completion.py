"""The body of `POST /v1/completions`."""

from typing import Annotated, Any, cast

from pydantic import Field

from gateway_svc.http.bodies.fields import (
    GenerationMessage,
    TokenIds,
    message_type,
    prompt_id,
    unsupported,
)
from gateway_svc.http.bodies.sampling import SamplingFields
from quire.v1 import inference_pb2

MAX_PROMPTS = 1024
# OpenAI's default.
_MAX_TOKENS = 16


Prompt = str | TokenIds


class CompletionRequest(SamplingFields):
    prompt: (
        str
        | Annotated[TokenIds, Field(min_length=1)]
        | Annotated[list[Prompt], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    )
    # 0 only with `echo`: no output is returned then.
    max_tokens: Annotated[int, Field(ge=0, le=2**32 - 1)] | None = None
    # Log-probabilities of this many most likely tokens, and of the sampled one.
    logprobs: Annotated[int, Field(ge=0, le=2**32 - 1)] | None = None
    # Puts the prompt before the output, with its log-probabilities if those are requested.
    echo: bool | None = None
    add_special_tokens: unsupported(True) = None  # type: ignore[valid-type]
    suffix: unsupported("") = None  # type: ignore[valid-type]
    best_of: unsupported(1) = None  # type: ignore[valid-type]
    prompt_embeds: unsupported() = None  # type: ignore[valid-type]

    @property
    def prompts(self) -> list[str | list[int]]:
        """A text or a list of token ids is one prompt."""
        match self.prompt:
            case str() | [int(), *_]:
                return cast(list[str | list[int]], [self.prompt])
            case _:
                return cast(list[str | list[int]], self.prompt)

    @property
    def has_echo_logprobs(self) -> bool:
        return bool(self.echo) and self.logprobs is not None

    def messages(
        self, request_id: str, most_output_tokens: int | None = None
    ) -> list[GenerationMessage]:
        """One per prompt, each with an id of its own. `most_output_tokens` of all choices together
        bound the default of `max_tokens`."""
        params = self.sampling_params()
        if self.max_tokens is None:
            params.max_tokens = _MAX_TOKENS
            if most_output_tokens is not None:
                most = most_output_tokens // (params.n if params.HasField("n") else 1)
                params.max_tokens = max(1, min(_MAX_TOKENS, most))
        elif self.max_tokens == 0:
            # A request samples one token at least.
            params.max_tokens = 1
        if self.logprobs is not None:
            params.logprobs = self.logprobs
        if self.has_echo_logprobs and self.prompt_logprobs is None:
            params.prompt_logprobs = params.logprobs
        create = message_type(bool(self.stream))
        return [
            create(
                request_id=prompt_id(request_id, number),
                model=self.model,
                sampling_params=params,
                cache_salt=self.cache_salt,
                priority=self.priority,
                resume_window_s=self.resume_window_s,
                **_prompt(prompt),
            )
            for number, prompt in enumerate(self.prompts)
        ]


def _prompt(prompt: str | list[int]) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"text": prompt}
    return {"token_ids": inference_pb2.TokenIds(ids=prompt)}
