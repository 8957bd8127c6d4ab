"""The catalogue of requests, drawn from a seed."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from quire.client.sampling_params import SamplingParams
from quire.client.structured_output import StructuredOutput

# Shared beginnings, so that requests hit each other's blocks in the prefix cache.
_OPENINGS = (
    "Return a list of the names that are defined in the given module, in the order in which",
    "Read the records of a file and return them as a list of tuples, one for each line that",
    "Raised when an operation runs out of time before the other side has replied, whether",
    "",
)
_TEXT = (
    "the value of a file name is given as string or bytes object and may be any number that "
    "this method takes when it reads from an open stream until its end or raises an error if "
    "there is no such attribute in the class instance which was called with these arguments"
)
# Stop strings, which occur early in some outputs, late or never in others.
_PAIRS = ("gh", "mp", "ul", "ck", "pp", "qu", "sm", "ew")
_SHORT = (4, 24)
_MEDIUM = (32, 96)
_LONG = (160, 320)
# Run longer than the orphans' grace period: a request that is not cancelled is found.
_ENDLESS = (400, 500)


@dataclass(frozen=True)
class Request:
    """A request of the catalogue."""

    kind: str
    prompt: str | list[int]
    params: SamplingParams
    # Tokens after which the client cancels; None: it reads to the end.
    cancel_after: int | None = None


@dataclass(frozen=True)
class Kind:
    """A kind of request."""

    name: str
    # Share of all requests, relative to the other kinds.
    weight: int
    max_tokens: tuple[int, int]
    sampling: Callable[[random.Random], dict[str, Any]]
    cancels: bool = False


def _greedy(_: random.Random) -> dict[str, Any]:
    return {"temperature": 0.0}


def _sampled(rng: random.Random) -> dict[str, Any]:
    return {"temperature": rng.choice((0.7, 1.0, 1.3)), "top_p": rng.choice((0.9, 1.0))}


def _choices(rng: random.Random) -> dict[str, Any]:
    return {**_sampled(rng), "n": 4}


def _stopping(rng: random.Random) -> dict[str, Any]:
    return {**_sampled(rng), "stop": rng.sample(_PAIRS, 2)}


def _logprobs(rng: random.Random) -> dict[str, Any]:
    return {**_sampled(rng), "logprobs": 3}


def _processed(rng: random.Random) -> dict[str, Any]:
    """Everything that changes logits."""
    return {
        **_sampled(rng),
        "top_k": 200,
        "min_p": 0.01,
        "typical_p": 0.95,
        "presence_penalty": rng.choice((-0.5, 0.3)),
        "frequency_penalty": rng.choice((0.1, 0.4)),
        "repetition_penalty": rng.choice((0.9, 1.2)),
        "min_tokens": 20,
        "logit_bias": {token_id: rng.uniform(-3, 3) for token_id in rng.sample(range(300), 8)},
        "bad_words": rng.sample(("the", " of a", "file", "is not"), 2),
    }


_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "kind": {"enum": ["function", "method", "class"]},
        "arguments": {
            "type": "array",
            "items": {"type": "string", "maxLength": 20},
            "maxItems": 6,
        },
        "line": {"type": "integer", "minimum": 1, "maximum": 9999},
    },
    "required": ["name", "kind", "arguments", "line"],
    "additionalProperties": False,
}
_FORMATS = (
    StructuredOutput(json=_SCHEMA),
    StructuredOutput(regex=r"[A-Z][a-z]{2,30}(, [a-z ]{3,40}){2,6}\."),
    StructuredOutput(choice=["Return the name.", "Return the number of lines.", "Raise an error."]),
)


def _guided(rng: random.Random) -> dict[str, Any]:
    # The end of the format ends the output, so that the end of the text must not be ignored.
    return {**_sampled(rng), "structured_output": rng.choice(_FORMATS), "ignore_eos": False}


KINDS = (
    Kind("greedy", 3, _MEDIUM, _greedy),
    Kind("sampled", 5, _MEDIUM, _sampled),
    Kind("short", 2, _SHORT, _sampled),
    Kind("long", 3, _LONG, _sampled),
    Kind("endless", 2, _ENDLESS, lambda rng: {**_sampled(rng), "ignore_eos": True}),
    Kind("choices", 3, _MEDIUM, _choices),
    Kind("stopping", 4, _LONG, _stopping),
    Kind("stopping choices", 1, _LONG, lambda rng: {**_stopping(rng), "n": 4}),
    Kind("logprobs", 3, _MEDIUM, _logprobs),
    Kind("logprobs stopping", 1, _LONG, lambda rng: {**_stopping(rng), "n": 4, "logprobs": 3}),
    Kind("processed", 3, _MEDIUM, _processed),
    Kind("guided", 4, _LONG, _guided),
    Kind("guided choices", 2, _LONG, lambda rng: {**_guided(rng), "n": 4}),
    # Bad words could exclude all that a format allows.
    Kind(
        "guided and processed",
        2,
        _LONG,
        lambda rng: {**_processed(rng), **_guided(rng), "bad_words": None},
    ),
    Kind("cancelled", 2, _LONG, _sampled, cancels=True),
    Kind("cancelled choices", 1, _MEDIUM, _choices, cancels=True),
)


def catalogue(seed: int, size: int, kinds: Sequence[Kind] = KINDS) -> list[Request]:
    """Return `size` distinct requests, at least one of each kind if `size` permits."""
    rng = random.Random(seed)
    drawn = rng.choices(kinds, [kind.weight for kind in kinds], k=max(0, size - len(kinds)))
    return [_request(kind, rng) for kind in [*kinds, *drawn][:size]]


def _request(kind: Kind, rng: random.Random) -> Request:
    max_tokens = rng.randint(*kind.max_tokens)
    # Half of the requests respect the end-of-sequence token.
    sampling = {"ignore_eos": rng.random() < 0.5, **kind.sampling(rng)}
    params = SamplingParams(**sampling, max_tokens=max_tokens, seed=rng.getrandbits(64))
    cancel_after = rng.randint(1, max_tokens) if kind.cancels else None
    return Request(kind.name, _prompt(rng), params, cancel_after)


def _prompt(rng: random.Random) -> str:
    length = rng.choice((3, 12, 40, 160))
    return " ".join([rng.choice(_OPENINGS), *rng.choices(_TEXT.split(), k=length)]).strip()
