"""Scales of 8-bit caches, per layer: keys and values are divided by them when they are cached."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog
import torch
from safetensors import safe_open

from worker_svc.model.checkpoint import ModelError

log = structlog.get_logger()

# Names in checkpoints of llm-compressor, ModelOpt, AutoFP8 and Quark, such as
# `model.layers.3.self_attn.k_scale`: the decoder layer's number, modules, and the scale.
_NAME: Final = re.compile(
    r"(?P<prefix>(?:.*\.)?)(?P<layer>\d+)\.(?:[^.]+\.)*?"
    r"(?P<kind>k_scale|v_scale|kv_scale|k_proj\.output_scale|v_proj\.output_scale)"
)


@dataclass(frozen=True)
class KvScales:
    """Scales of one layer: its cache holds `key / scale` and `value / scale`."""

    key: float = 1.0
    value: float = 1.0


@dataclass(frozen=True)
class KvMaxima:
    """The largest magnitudes of one layer's keys and values."""

    key: float
    value: float


def scales_of_maxima(maxima: Iterable[KvMaxima], dtype: torch.dtype) -> tuple[KvScales, ...]:
    """Scales that map the largest magnitudes to the dtype's largest number; 1.0, with a warning,
    if a maximum is 0 or not finite."""
    largest = torch.finfo(dtype).max
    return tuple(
        KvScales(
            _scale(layer, "keys", found.key, largest), _scale(layer, "values", found.value, largest)
        )
        for layer, found in enumerate(maxima)
    )


def _scale(layer: int, what: str, maximum: float, largest: float) -> float:
    if math.isfinite(maximum) and (scale := maximum / largest) > 0:
        return scale
    log.warning("no scale found, 1.0 is used", layer=layer, of=what, maximum=maximum)
    return 1.0


def read_scales(weights: Iterable[Path], num_layers: int) -> tuple[KvScales, ...] | None:
    """The scales in a checkpoint's safetensors files; None if a layer has none, with a warning if
    another layer has some. Of scales per head the largest is used.

    ModelError if a scale is not a positive number.
    """
    found: defaultdict[str, dict[tuple[int, str], float]] = defaultdict(dict)
    for prefix, layer, kind, scale in _scales_in(weights):
        for one in kind:
            found[prefix][layer, one] = scale
    for scales in found.values():
        if all((layer, kind) in scales for layer in range(num_layers) for kind in "kv"):
            return tuple(KvScales(scales[i, "k"], scales[i, "v"]) for i in range(num_layers))
    if found:
        counts = {prefix: len(scales) for prefix, scales in found.items()}
        log.warning("scales in the checkpoint are ignored: not all layers have them", found=counts)
    return None


def _scales_in(weights: Iterable[Path]) -> Iterator[tuple[str, int, str, float]]:
    """Per scale: the name before the layer's number, that number, `k`, `v` or `kv`, the scale."""
    for path in (path for path in weights if path.suffix == ".safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                if match := _NAME.fullmatch(name):
                    kind = re.split(r"[_.]", match["kind"])[0]
                    scale = float(file.get_tensor(name).float().max())
                    if not (math.isfinite(scale) and scale > 0):
                        raise ModelError(f"{path.name}: {name} is {scale}, not a positive number")
                    yield match["prefix"], int(match["layer"]), kind, scale
