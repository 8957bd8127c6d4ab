"""Log-probabilities in the two shapes of OpenAI's API, and those of prompts in vLLM's."""

import math
from collections.abc import Sequence
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
    tokens = [_split(logprobs) for logprobs in update.logprobs]
    return {
        "tokens": [_token(sampled, model) for sampled, _ in tokens],
        "token_logprobs": [_number(sampled[1]) for sampled, _ in tokens],
        "top_logprobs": [
            None if math.isnan(sampled[1]) else _by_text([sampled, *top], model)
            for sampled, top in tokens
        ],
        "text_offset": list(update.text_offsets),
    }


def prompt_logprobs(
    logprobs: Sequence[TokenLogprobs], model: Model
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's shape: per token of the prompt an object by token id, null for the first one."""
    return [
        None,
        *(
            {str(id_): _ranked(id_, logprob, rank, model) for id_, logprob, rank in one.entries()}
            for one in logprobs[1:]
        ),
    ]


def chat_logprobs(update: ChoiceUpdate, model: Model) -> list[dict[str, Any]] | None:
    """One object per token, with those of the most likely tokens. The output begins a text: its
    first token may lack the space that others of its kind have."""
    if not update.logprobs:
        return None
    tokens = [_split(logprobs) for logprobs in update.logprobs]
    return [
        {**to_json(sampled, model), "top_logprobs": [to_json(entry, model) for entry in top]}
        for index, (sampled, top) in enumerate(tokens, update.first_index)
        for to_json in [_object if index else _first_object]
    ]


def _split(logprobs: TokenLogprobs) -> tuple[_Entry, list[_Entry]]:
    sampled, *top = logprobs.entries()
    return sampled, top


def _by_text(entries: Sequence[_Entry], model: Model) -> dict[str, float]:
    """Log-probabilities by text. Of tokens with one text, such as parts of characters, the most
    likely one counts."""
    found: dict[str, float] = {}
    for id_, logprob, _ in entries:
        text = model.token_texts[id_]
        found[text] = max(logprob, found.get(text, _LOWEST))
    return found


def _token(entry: _Entry, model: Model) -> str:
    """The text of a token. A prompt's first one, which has no log-probability, begins the text: it
    may lack the space that others of its kind have."""
    id_, logprob, _ = entry
    return model.vocabulary.decode([id_]) if math.isnan(logprob) else model.token_texts[id_]


def _object(entry: _Entry, model: Model) -> dict[str, Any]:
    id_, logprob, _ = entry
    return {
        "token": model.token_texts[id_],
        "logprob": max(logprob, _LOWEST),
        "bytes": list(model.token_bytes[id_]),
    }


def _first_object(entry: _Entry, model: Model) -> dict[str, Any]:
    """That of the token alone."""
    found, text = _object(entry, model), model.vocabulary.decode([entry[0]])
    if found["token"] != text:
        found |= {"token": text, "bytes": list(text.encode())}
    return found


def _ranked(id_: int, logprob: float, rank: int, model: Model) -> dict[str, Any]:
    return {"logprob": _number(logprob), "rank": rank, "decoded_token": model.token_texts[id_]}


def _number(logprob: float) -> float | None:
    """None for the first token of a prompt, which has none."""
    return None if math.isnan(logprob) else max(logprob, _LOWEST)
