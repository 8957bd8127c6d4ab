"""Loads a rank's shard of a model, reading only its part of the files."""

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
from worker_svc.settings import size_text

log = structlog.get_logger()


def load_shard(
    network_class: Any, config: Any, weights: tuple[Path, ...], shard: Shard, **options: Any
) -> Any:
    """A network with the shard's heads, width and vocabulary. The options are those of
    `from_pretrained`. WrongSettingError if the model cannot be split; ModelError if its tensors are
    not those of its class."""
    narrow = narrow_config(config, shard)
    tensors = read_parts(config, weights, shard)
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    log.info("shard", index=shard.index, count=shard.count, weights=size_text(num_bytes))
    network, _ = load_network(shard_class(network_class, shard), narrow, tensors, {}, **options)
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
