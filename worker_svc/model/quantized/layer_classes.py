"""The classes of a network's layers, before it is loaded."""

import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import torch
from torch import nn

from worker_svc.model.checkpoint import ModelError

_LINEAR: Final = ("Linear", "Module")
_EXPERT: Final = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True)
class LayerClasses:
    """The names of the classes of linear layers and embeddings, with those of their bases."""

    by_layer: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def classes_of(self, layer: str) -> tuple[str, ...]:
        """Those of a layer of the checkpoint. A layer that the network does not have is linear."""
        # A checkpoint may have other prefixes than the network.
        last = layer.rpartition(".")[2]
        return self.by_layer.get(layer) or self._by_last_name.get(last, _LINEAR)

    @cached_property
    def _by_last_name(self) -> Mapping[str, tuple[str, ...]]:
        return {layer.rpartition(".")[2]: classes for layer, classes in self.by_layer.items()}


def layer_classes(network_class: Any, config: Any) -> LayerClasses:
    """Those of a network, which takes no memory. ModelError if the config does not make one."""
    try:
        with torch.device("meta"):
            # A network changes its config.
            network = network_class(deepcopy(config))
    except Exception as error:  # Of any kind: the code is the model's own.
        raise ModelError(f"{network_class.__name__} cannot be loaded: {error!r}") from error
    return LayerClasses(
        {
            name: tuple(c.__name__ for c in type(module).__mro__ if issubclass(c, nn.Module))
            for name, module in network.named_modules()
            if isinstance(module, nn.Linear | nn.Embedding)
        }
    )


def refuse_joined_experts(layers: Iterable[str], network_class: Any, config: Any) -> None:
    """ModelError if a layer of the checkpoint is an expert's, and the network has the weights of
    all experts in one tensor. transformers would allocate that before it is known to be missing."""
    layer = next((layer for layer in layers if _EXPERT.search(layer)), None)
    if layer is None:
        return
    if not any(_EXPERT.search(name) for name in layer_classes(network_class, config).by_layer):
        raise missing_layer(network_class, layer)


def missing_layer(network_class: Any, layer: str) -> ModelError:
    name = network_class.__name__
    return ModelError(f"{name} has no linear layer for the quantised weight of {layer}")
