"""Work of equal lengths: free outputs, and formats that cannot end before their last token."""

from collections.abc import Mapping, Sequence
from typing import Any

from quire.bench.lengths import lengths
from quire.bench.workload import Workload

NUM_REQUESTS = 32
NUM_TOKENS = 128
PROMPT_LENGTH = 32
# A token has at most two characters.
_MIN_CHARACTERS = 2 * NUM_TOKENS + 1
_TOKEN_IDS = range(300, 8000)
# The model has no end of sequence. This one has a character that no format here needs.
STOP_TOKEN_ID = 0

# A format by the name of its kind, as in vLLM's `structured_outputs`; None: free.
Format = Mapping[str, Any] | None
FREE, REGEX, SCHEMA = "free", "regex", "schema"


def prompts(count: int, seed: int) -> list[list[int]]:
    load = Workload(
        num_requests=count,
        prompt_lengths=lengths(str(PROMPT_LENGTH)),
        output_lengths=lengths(str(NUM_TOKENS)),
        token_ids=_TOKEN_IDS,
        seed=seed,
    )
    return [request.prompt_token_ids for request in load.requests()]


def formats(count: int) -> Mapping[str, Sequence[Format]]:
    """The formats of `count` requests by kind of work, no two of them equal."""
    return {
        FREE: [None] * count,
        REGEX: [{"regex": _regex(at)} for at in range(count)],
        SCHEMA: [{"json": _schema(at)} for at in range(count)],
    }


def _regex(number: int) -> str:
    """Text whose every token is one of hundreds."""
    return f"[a-z ]{{{_MIN_CHARACTERS + number},{2 * _MIN_CHARACTERS}}}"


def _schema(number: int) -> dict[str, Any]:
    """A list of records, whose names and punctuation are forced."""
    record = {
        "type": "object",
        "properties": {
            "identifier": {"type": "integer", "minimum": 0, "maximum": 999 + number},
            "description": {"type": "string", "pattern": "^[a-z ]{8,16}$"},
            "is_active": {"type": "boolean"},
        },
        "required": ["identifier", "description", "is_active"],
        "additionalProperties": False,
    }
    return {"type": "array", "items": record, "minItems": 50, "maxItems": 60}
