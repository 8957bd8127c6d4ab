"""Rotary embeddings of the kind `longrope`, which have a set of frequencies for short sequences and
one for long ones.

transformers chooses the set by the longest sequence of the batch: a sequence's output would depend
on the batch, and cached keys of both kinds would mix. Here one set serves all sequences, the long
one if the longest sequence served is beyond the short range, as in vLLM.
"""

from collections.abc import Iterator
from typing import Any

import structlog

log = structlog.get_logger()


def longrope_default(config: Any, limit: int | None) -> int | None:
    """The longest sequence if none is set: the model's `limit`, or its short range."""
    short = [part["original_max_position_embeddings"] for part in _parts(config)]
    if not short or limit is None or min(short) >= limit:
        return limit
    log.info(
        "longrope is served up to its short range; --max-model-len selects the long one",
        tokens=min(short),
        of=limit,
    )
    return int(min(short))


def choose_longrope_factors(config: Any, max_model_len: int) -> None:
    """Make both sets of factors in the config equal: those for the longest sequence served. So are
    PhiMoE's scales of both sets."""
    for part in _parts(config):
        is_long = max_model_len > part["original_max_position_embeddings"]
        if is_long:
            part["short_factor"] = part["long_factor"]
        if is_long and "long_mscale" in part:
            part["short_mscale"] = part["long_mscale"]


def _parts(config: Any) -> Iterator[dict[str, Any]]:
    """The parameters of that kind: the model's, or those of some types of layers."""
    parameters = getattr(config, "rope_parameters", None) or {}
    for part in (parameters, *(one for one in parameters.values() if isinstance(one, dict))):
        if part.get("rope_type") == "longrope":
            yield part
