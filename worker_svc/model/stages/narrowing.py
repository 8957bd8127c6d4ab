"""The config, the class and the tensors of a stage: those of a model with fewer layers."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import GPT2LMHeadModel

from worker_svc.errors import WrongSettingError
from worker_svc.model.checkpoint import ModelError
from worker_svc.model.quantized.checkpoint_tensors import StoredTensor
from worker_svc.model.stages.stage import Stage

_SETTING: Final = "--pipeline-parallel-size / QUIRE_WORKER_PIPELINE_PARALLEL_SIZE"
_LAYER: Final = re.compile(r"(?P<before>(?:.*\.)?(?:layers|h)\.)(?P<layer>\d+)(?P<after>\..+)")
_EMBEDDING: Final = re.compile(r"(?:.*\.)?(?:embed_tokens|wte)\.weight")
_POSITIONS: Final = re.compile(r"(?:.*\.)?wpe\.weight")
_HEAD: Final = "lm_head.weight"
# Tokens of a stand-in of an embedding or a head: as many as probes of a model use.
STAND_IN_TOKENS: Final = 4
# What a config has for each layer.
_PER_LAYER: Final = ("layer_types", "mlp_layer_types", "no_rope_layers")
# What makes a layer depend on its number in another way, with the value that does not.
_BY_NUMBER: Final[Mapping[str, Any]] = {
    "scale_attn_by_inverse_layer_idx": False,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}


@dataclass(frozen=True)
class Source:
    """A tensor of a stage: its name in the checkpoint, and whether it is a stand-in, of which
    `stand_in_rows` are read."""

    name: str
    is_stand_in: bool = False


def stand_in_rows(stored: StoredTensor) -> Tensor:
    return stored[:STAND_IN_TOKENS]


def require_uniform_layers(config: Any) -> None:
    """WrongSettingError if a layer depends on its number, which changes in a stage."""
    for name, value in _BY_NUMBER.items():
        if (found := getattr(config, name, None)) not in (None, value):
            raise WrongSettingError(
                f"{_SETTING}: models with {name}={found} cannot be divided into stages; leave it "
                "at 1"
            )


def stage_config(config: Any, layers: range) -> Any:
    """Change the config of a model to that of a stage, and return it."""
    for name in _PER_LAYER:
        if (values := getattr(config, name, None)) is not None:
            setattr(config, name, list(values)[layers.start : layers.stop])
    config.num_hidden_layers = len(layers)
    # The head is in another stage, or has a copy.
    config.tie_word_embeddings = False
    return config


def stage_class(network_class: Any, stage: Stage) -> Any:
    """The class of a stage's network, which has stand-ins of what other stages have."""

    def __init__(self: Any, config: Any) -> None:  # noqa: N807
        network_class.__init__(self, config)
        if not stage.is_first:
            embedding = self.get_input_embeddings()
            embedding.num_embeddings = _shorten(embedding)
            if isinstance(self, GPT2LMHeadModel):
                self.transformer.wpe = _NoPositions()
        if not stage.is_last:
            head = self.get_output_embeddings()
            head.out_features = _shorten(head)

    return type(network_class.__name__, (network_class,), {"__init__": __init__})


def _shorten(module: nn.Module) -> int:
    """Leave the rows of a stand-in; return their number."""
    module.weight = nn.Parameter(module.get_parameter("weight")[:STAND_IN_TOKENS].clone())
    return len(module.weight)


class _NoPositions(nn.Module):
    """Adds nothing: positions are in the hidden states already."""

    def forward(self, positions: Tensor) -> Tensor:
        return torch.zeros(1, device=positions.device)


def layer_of(name: str) -> int | None:
    """The number of the layer that a tensor belongs to."""
    match = _LAYER.fullmatch(name)
    return None if match is None else int(match["layer"])


def head_of(names: Iterable[str]) -> str:
    """The name of the head, or of the embedding where it is also the head. ModelError if there is
    neither."""
    found = list(names)
    if _HEAD in found:
        return _HEAD
    embeddings = [name for name in found if _EMBEDDING.fullmatch(name)]
    if len(embeddings) != 1:
        raise ModelError(f"{_SETTING}: the checkpoint has neither {_HEAD} nor one embedding")
    return embeddings[0]


def stage_tensors(names: Iterable[str], stage: Stage, layers: range) -> dict[str, Source]:
    """The tensors of a stage by their names in its network."""
    found = sorted(names)
    head = head_of(found)
    return {
        **dict(_of_stage(found, stage, layers)),
        _HEAD: Source(head, is_stand_in=not stage.is_last),
    }


def _of_stage(names: Iterable[str], stage: Stage, layers: range) -> Iterator[tuple[str, Source]]:
    for name in names:
        if (match := _LAYER.fullmatch(name)) is not None:
            if (layer := int(match["layer"])) in layers:
                own = f"{match['before']}{layer - layers.start}{match['after']}"
                yield own, Source(name)
        elif _EMBEDDING.fullmatch(name):
            yield name, Source(name, is_stand_in=not stage.is_first)
        elif stage.is_first or not _POSITIONS.fullmatch(name):
            yield name, Source(name)


def head_cost(names: Iterable[str], num_bytes: Callable[[str], int], num_layers: int) -> float:
    """What the head costs in layers, by the sizes of both. `num_bytes` is that of a tensor."""
    found = list(names)
    of_layers = sum(num_bytes(name) for name in found if layer_of(name) is not None)
    return num_bytes(head_of(found)) * num_layers / max(1, of_layers)
