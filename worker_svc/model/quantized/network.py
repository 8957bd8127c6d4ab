"""Builds the network of a quantised checkpoint.

transformers loads all tensors but the quantised ones. In their places it gets weights of the same
shape that are NaN and take no memory. By these the layers are recognised, whatever transformers
calls them.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from worker_svc.model.checkpoint import ModelError
from worker_svc.model.quantized.checkpoint_tensors import StoredWeight
from worker_svc.model.quantized.layer_classes import missing_layer
from worker_svc.model.quantized.sources import WeightSources


def load_network(
    network_class: Any,
    config: Any,
    plain: Mapping[str, Tensor],
    quantized: Mapping[str, StoredWeight],
    **options: Any,
) -> tuple[Any, WeightSources]:
    """The network, and where its quantised weights come from. `plain` has the other tensors by
    name, `quantized` has the weights by layer. The options are those of `from_pretrained`.

    ModelError if tensors are missing or have other shapes, or if a quantised weight belongs to
    something other than a linear layer or an embedding.
    """
    dtype = _dtype(options.pop("dtype"), config, plain)
    for level in (config, config.get_text_config()):
        if hasattr(level, "quantization_config"):
            del level.quantization_config
    stand_ins = {layer: _stand_in(stored.shape, dtype) for layer, stored in quantized.items()}
    state = {**plain, **{f"{layer}.weight": weight for layer, weight in stand_ins.items()}}
    network = load_complete(
        network_class, None, config=config, state_dict=state, dtype=dtype, **options
    )
    return network, _sources(network, stand_ins, quantized)


def load_complete(network_class: Any, folder: Path | None, **options: Any) -> Any:
    """The network of `from_pretrained`, with its arguments. ModelError if the config makes none, or
    if the checkpoint lacks tensors of the model, or has some of other shapes: these would be
    random."""
    try:
        network, info = network_class.from_pretrained(
            folder,
            output_loading_info=True,
            # They are refused below, by name.
            ignore_mismatched_sizes=True,
            **options,
        )
    except Exception as error:  # Of any kind: the code is the model's own.
        raise ModelError(f"{network_class.__name__} cannot be loaded: {error!r}") from error
    if mismatched := sorted(info["mismatched_keys"]):
        name, found, expected = mismatched[0]
        raise ModelError(f"{name}: {list(found)} in the checkpoint, not {list(expected)}")
    if missing := sorted(info["missing_keys"]):
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ModelError(f"the checkpoint has no {', '.join(missing[:3])}{more}")
    return network


def move_stand_ins(sources: WeightSources, device: torch.device) -> None:
    """Move the weights of layers that have a source, which are NaN, so that they take no memory on
    the device either."""
    moved: dict[int, nn.Parameter] = {}
    for module in sources:
        weight = module.get_parameter("weight")
        if id(weight) not in moved:
            there = weight.detach()[:1, :1].to(device).expand(weight.shape)
            moved[id(weight)] = nn.Parameter(there, requires_grad=False)
        module.weight = moved[id(weight)]


def _dtype(setting: str, config: Any, plain: Mapping[str, Tensor]) -> torch.dtype:
    """That of the setting, or of the config, or of the first tensor."""
    if setting != "auto":
        dtype: torch.dtype = getattr(torch, setting)
        return dtype
    found = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None)
    if isinstance(found, str):
        found = getattr(torch, found, None)
    floats = (tensor.dtype for tensor in plain.values() if tensor.is_floating_point())
    return found if isinstance(found, torch.dtype) else next(floats, torch.float32)


def _stand_in(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    return torch.full((1, 1), torch.nan, dtype=dtype).expand(shape)


def _sources(
    network: nn.Module, stand_ins: Mapping[str, Tensor], quantized: Mapping[str, StoredWeight]
) -> WeightSources:
    layer_at = {weight.data_ptr(): layer for layer, weight in stand_ins.items()}
    sources: dict[nn.Module, Callable[[], Any]] = {}
    placed = set()
    for module in network.modules():
        weight = getattr(module, "weight", None)
        layer = layer_at.get(weight.data_ptr()) if isinstance(weight, nn.Parameter) else None
        if layer is not None:
            if not isinstance(module, nn.Embedding) and type(module) is not nn.Linear:
                raise ModelError(f"{layer}: a quantised weight in a {type(module).__name__}")
            sources[module] = quantized[layer].read
            placed.add(layer)
    if unplaced := sorted(quantized.keys() - placed):
        raise missing_layer(type(network), unplaced[0])
    return sources
