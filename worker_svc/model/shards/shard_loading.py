"""Loads a rank's shard of a model or of a stage, reading only its part of the files."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import structlog
from torch import Tensor

from worker_svc.model.quantized.checkpoint_tensors import StoredModel, StoredWeight
from worker_svc.model.quantized.network import load_network
from worker_svc.model.quantized.sources import WeightSources
from worker_svc.model.shards.narrowing import (
    narrow_config,
    num_heads_of,
    rules_of,
    shard_class,
)
from worker_svc.model.shards.quantized_parts import part_of_weight, stand_in_weight
from worker_svc.model.shards.shard import Shard
from worker_svc.model.shards.splits import is_computed, part_of, rule_of
from worker_svc.model.stages.narrowing import (
    STAND_IN_TOKENS,
    Source,
    head_cost,
    require_uniform_layers,
    stage_class,
    stage_config,
    stage_tensors,
    stand_in_rows,
)
from worker_svc.model.stages.stage import Stage
from worker_svc.sizes import size_text

log = structlog.get_logger()


@dataclass(frozen=True)
class ShardTensors:
    """What a rank has of a checkpoint, by the names in its network."""

    plain: Mapping[str, Tensor]
    quantized: Mapping[str, StoredWeight]  # by layer; not read yet


def load_shard(
    network_class: Any,
    config: Any,
    stored: StoredModel,
    shard: Shard,
    layers: range | None,
    **options: Any,
) -> tuple[Any, WeightSources]:
    """A network with the shard's heads, width and vocabulary, and the `layers` of its stage, and
    where its quantised weights come from. The options are those of `from_pretrained`.
    WrongSettingError if the model cannot be split; ModelError if its tensors are not those of its
    class."""
    narrow, narrow_class = narrow_config(config, shard), shard_class(network_class, shard)
    tensors = read_parts(config, stored, shard, layers)
    of_stage: dict[str, Any] = {}
    if shard.stage is not None and layers is not None:
        narrow, narrow_class = stage_config(narrow, layers), stage_class(narrow_class, shard.stage)
        of_stage = {"stage": shard.stage.index, "layers": f"{layers.start} to {layers.stop - 1}"}
    num_bytes = sum(tensor.nbytes for tensor in tensors.plain.values())
    log.info(
        "shard",
        index=shard.index,
        count=shard.count,
        **of_stage,
        weights=size_text(num_bytes),
        quantised_weights=len(tensors.quantized),
    )
    return load_network(narrow_class, narrow, tensors.plain, tensors.quantized, **options)


def layers_of(config: Any, stored: StoredModel, stage: Stage) -> range:
    """The stage's layers. WrongSettingError if the settings are for another number of layers, or if
    the model has no stages."""
    require_uniform_layers(config)
    num_layers = config.num_hidden_layers
    return stage.layers(num_layers, head_cost(stored.names, stored.num_bytes, num_layers))


def read_parts(
    config: Any, stored: StoredModel, shard: Shard, layers: range | None
) -> ShardTensors:
    """The shard's parts of all tensors, or of those of its stage, which has these layers."""
    rules = rules_of(config)
    _, num_kv_heads = num_heads_of(config)
    plain, quantized = {}, {}
    for own, source in _sources(stored, shard.stage, layers).items():
        rule, weight = rule_of(source.name, rules), stored.weight_of(source.name)
        if weight is not None:
            layer, stored_layer = (name.removesuffix(".weight") for name in (own, source.name))
            if source.is_stand_in:
                quantized[layer] = stand_in_weight(STAND_IN_TOKENS, weight)
            else:
                quantized[layer] = part_of_weight(stored_layer, weight, rule, shard, num_kv_heads)
        elif source.is_stand_in:
            plain[own] = stand_in_rows(stored.plain[source.name])
        else:
            plain[own] = part_of(stored.plain[source.name], rule, shard, num_kv_heads)
    return ShardTensors(plain, quantized)


def _sources(stored: StoredModel, stage: Stage | None, layers: range | None) -> dict[str, Source]:
    """By the names in the network."""
    names = sorted(name for name in stored.names if not is_computed(name))
    if stage is None or layers is None:
        return {name: Source(name) for name in names}
    return stage_tensors(names, stage, layers)
