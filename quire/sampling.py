"""How tokens are chosen and where they end, as callers say it."""

from collections.abc import Sequence
from dataclasses import dataclass

from quire.v1 import inference_pb2

_UINT32_MAX = 2**32 - 1
_UINT64_MAX = 2**64 - 1


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters; None leaves a choice to the server.

    The server judges the values. ValueError here only for numbers that no message can carry.
    """

    # 0 takes the most likely token; the server's default is 1.
    temperature: float | None = None
    # Tokens considered, most likely first; 0, the default, considers all.
    top_k: int | None = None
    # Probability mass considered, in (0, 1]; the default is 1.
    top_p: float | None = None
    # Equal seeds give equal random bits; without one it derives from the request's id.
    seed: int | None = None
    # The default is what the model's context has left.
    max_tokens: int | None = None
    # Texts that end the output and are not part of it.
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None

    def __post_init__(self) -> None:
        _check_unsigned("top_k", self.top_k, _UINT32_MAX)
        _check_unsigned("max_tokens", self.max_tokens, _UINT32_MAX)
        _check_unsigned("seed", self.seed, _UINT64_MAX)
        for token_id in self.stop_token_ids or ():
            _check_unsigned("stop_token_ids", token_id, _UINT32_MAX)

    def to_proto(self) -> inference_pb2.SamplingParams:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        return inference_pb2.SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed,
            max_tokens=self.max_tokens,
            stop=stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            skip_special_tokens=self.skip_special_tokens,
        )


def _check_unsigned(name: str, value: int | None, maximum: int) -> None:
    if value is not None and not 0 <= value <= maximum:
        raise ValueError(f"{name}: must be from 0 to {maximum} (got {value!r})")
