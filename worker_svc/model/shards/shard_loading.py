"""Loads a rank's shard of a model or of a stage, reading only its part of the files."""

import math
from pathlib import Path
from typing import Any

import structlog
from torch import Tensor

from worker_svc.model.quantized.checkpoint_tensors import CheckpointTensors
from worker_svc.model.quantized.network import load_network
from worker_svc.model.shards.narrowing import (
    narrow_config,
    num_heads_of,
    rules_of,
    shard_class,
)
from worker_svc.model.shards.shard import Shard
from worker_svc.model.shards.splits import part_of, rule_of
from worker_svc.model.stages.narrowing import (
    head_cost,
    require_uniform_layers,
    stage_class,
    stage_config,
    stage_tensors,
    stand_in_rows,
)
from worker_svc.model.stages.stage import Stage
from worker_svc.settings import size_text

log = structlog.get_logger()


def load_shard(
    network_class: Any, config: Any, weights: tuple[Path, ...], shard: Shard, **options: Any
) -> Any:
    """A network with the shard's heads, width and vocabulary, and the stage's layers. The options
    are those of `from_pretrained`. WrongSettingError if the model cannot be split; ModelError if
    its tensors are not those of its class."""
    stage = shard.stage
    narrow, narrow_class = narrow_config(config, shard), shard_class(network_class, shard)
    if stage is None:
        tensors, of_stage = read_parts(config, weights, shard), {}
    else:
        require_uniform_layers(config)
        layers = layers_of(config, weights, stage)
        tensors = read_stage(config, weights, shard, stage, layers)
        narrow, narrow_class = stage_config(narrow, layers), stage_class(narrow_class, stage)
        of_stage = {"stage": stage.index, "layers": f"{layers.start} to {layers.stop - 1}"}
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    log.info(
        "shard", index=shard.index, count=shard.count, **of_stage, weights=size_text(num_bytes)
    )
    network, _ = load_network(narrow_class, narrow, tensors, {}, **options)
    return network


def read_parts(config: Any, weights: tuple[Path, ...], shard: Shard) -> dict[str, Tensor]:
    """The shard's parts of all tensors, by their names in the checkpoint."""
    rules = rules_of(config)
    _, num_kv_heads = num_heads_of(config)
    stored = CheckpointTensors(weights)
    return {
        name: part_of(stored.slice(name), rule_of(name, rules), shard, num_kv_heads)
        for name in sorted(stored.names)
    }


def layers_of(config: Any, weights: tuple[Path, ...], stage: Stage) -> range:
    """The stage's layers. WrongSettingError if the settings are for another number of layers."""
    stored, num_layers = CheckpointTensors(weights), config.num_hidden_layers
    cost = head_cost(stored.names, lambda name: math.prod(stored.shape(name)), num_layers)
    return stage.layers(num_layers, cost)


def read_stage(
    config: Any, weights: tuple[Path, ...], shard: Shard, stage: Stage, layers: range
) -> dict[str, Tensor]:
    """The shard's parts of a stage's tensors, by their names in its network."""
    rules = rules_of(config)
    _, num_kv_heads = num_heads_of(config)
    stored = CheckpointTensors(weights)
    return {
        own: stand_in_rows(stored.slice(source.name))
        if source.is_stand_in
        else part_of(stored.slice(source.name), rule_of(source.name, rules), shard, num_kv_heads)
        for own, source in stage_tensors(stored.names, stage, layers).items()
    }
