"""Log-probabilities in the two shapes of OpenAI's API."""

from typing import Any

from gateway_svc.generation.choice import ChoiceUpdate
from gateway_svc.scheduler.events import TokenLogprobs
from gateway_svc.text.served_model import Model

# JSON has no infinity; OpenAI's value for tokens that cannot be sampled.
_LOWEST = -9999.0

_Entry = tuple[int, float, int]


def completion_logprobs(update: ChoiceUpdate, model: Model) -> dict[str, Any] | None:
    """Parallel lists, one entry per token."""
    if not update.logprobs:
        return None
    texts = model.token_texts
    tokens = [_split(logprobs) for logprobs in update.logprobs]
    return {
        "tokens": [texts[sampled[0]] for sampled, _ in tokens],
        "token_logprobs": [max(sampled[1], _LOWEST) for sampled, _ in tokens],
        "top_logprobs": [
            {texts[id_]: max(logprob, _LOWEST) for id_, logprob, _ in [sampled, *top]}
            for sampled, top in tokens
        ],
        "text_offset": list(update.text_offsets),
    }


def chat_logprobs(update: ChoiceUpdate, model: Model) -> list[dict[str, Any]] | None:
    """One object per token, with those of the most likely tokens."""
    if not update.logprobs:
        return None
    tokens = [_split(logprobs) for logprobs in update.logprobs]
    return [
        {**_object(sampled, model), "top_logprobs": [_object(entry, model) for entry in top]}
        for sampled, top in tokens
    ]


def _split(logprobs: TokenLogprobs) -> tuple[_Entry, list[_Entry]]:
    sampled, *top = logprobs.entries()
    return sampled, top


def _object(entry: _Entry, model: Model) -> dict[str, Any]:
    id_, logprob, _ = entry
    return {
        "token": model.token_texts[id_],
        "logprob": max(logprob, _LOWEST),
        "bytes": list(model.token_bytes[id_]),
    }
