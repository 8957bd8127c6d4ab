"""Fields of every body that generates."""

from typing import Annotated, Any, Literal

from pydantic import Field

from gateway_svc.http.bodies.fields import (
    UINT32_MAX,
    HttpRequest,
    Texts,
    TokenIds,
    struct_of,
    unsupported,
)
from quire.service.errors import invalid
from quire.v1 import inference_pb2

_MAX_DIGITS = len(str(UINT32_MAX))
_MODES = {
    None: inference_pb2.LOGPROBS_MODE_UNSPECIFIED,
    "raw": inference_pb2.LOGPROBS_MODE_RAW,
    "processed": inference_pb2.LOGPROBS_MODE_PROCESSED,
}


class GenerationFields(HttpRequest):
    model: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    # By token id, as a text.
    logit_bias: dict[str, float] | None = None

    # As vLLM has them. A `top_k` of -1 stands for all tokens, a `seed` of -1 for none.
    top_k: Annotated[int, Field(ge=-1, le=UINT32_MAX)] | None = None
    min_p: float | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: str | None = None
    repetition_penalty: float | None = None
    min_tokens: Annotated[int, Field(ge=0, le=UINT32_MAX)] | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Texts | None = None
    # -1: as many tokens as the context has room for.
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=UINT32_MAX)] | None = None
    # As transformers has it.
    typical_p: float | None = None
    # Quire's: which distribution log-probabilities describe.
    logprobs_mode: Literal["raw", "processed"] | None = None
    # Quire's: arguments of the server's own logits processors, by their names.
    processor_args: dict[str, Any] | None = None
    # Quire's: false proposes no draft tokens, which changes no token.
    speculation: bool | None = None
    vllm_xargs: unsupported({}) = None  # type: ignore[valid-type]

    def fill_params(self, params: inference_pb2.SamplingParams) -> None:
        """Set the parameters of these fields. RequestError for a bias whose key is no token id, and
        for arguments nested too deeply."""
        kept = self.truncate_prompt_tokens
        params.MergeFrom(
            inference_pb2.SamplingParams(
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=0 if self.top_k == -1 else self.top_k,
                min_p=self.min_p,
                seed=None if self.seed in (None, -1) else self.seed % 2**64,
                presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty,
                repetition_penalty=self.repetition_penalty,
                min_tokens=self.min_tokens,
                logit_bias={_token_id(key): bias for key, bias in (self.logit_bias or {}).items()},
                allowed_token_ids=(
                    None
                    if self.allowed_token_ids is None
                    else inference_pb2.TokenIds(ids=self.allowed_token_ids)
                ),
                bad_words=self.bad_words,
                truncate_prompt_tokens=UINT32_MAX if kept == -1 else kept,
                typical_p=self.typical_p,
                logprobs_mode=_MODES[self.logprobs_mode],
                processor_args=struct_of("processor_args", self.processor_args),
                speculation=self.speculation,
            )
        )


def _token_id(key: str) -> int:
    if key.isascii() and key.isdecimal() and len(key) <= _MAX_DIGITS and int(key) <= UINT32_MAX:
        if str(int(key)) == key:
            return int(key)
        raise invalid("logit_bias", "INVALID_FIELD", f"has the key {key!r}; write {int(key)}")
    raise invalid("logit_bias", "INVALID_FIELD", f"has the key {key[:32]!r}; keys are token ids")
