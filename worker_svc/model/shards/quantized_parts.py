"""Loads a rank's shard of a model whose weights are quantised in the checkpoint.

A weight is read whole and converted to `QuantizedWeight`, in which the parts of all formats are
cut alike: scales and offsets follow outputs and groups of inputs. Weights are read one at a time,
when they are packed, so a rank keeps no more than its part.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import structlog
from torch import Tensor
from torch.nn.functional import pad

from kernels.quantized import QuantizedWeight
from worker_svc.model.quantized.checkpoint_tensors import CheckpointTensors, StoredWeight
from worker_svc.model.quantized.network import load_network
from worker_svc.model.quantized.sources import WeightSource, WeightSources
from worker_svc.model.shards.narrowing import narrow_config, num_heads_of, rules_of, shard_class
from worker_svc.model.shards.shard import Shard
from worker_svc.model.shards.splits import Rules, Split, kept_range, part_of, rule_of
from worker_svc.settings import WrongSettingError

log = structlog.get_logger()

_SETTING: Final = "--tensor-parallel-size / QUIRE_WORKER_TENSOR_PARALLEL_SIZE"
_OUTPUTS: Final = 0


def load_quantized_shard(
    network_class: Any,
    config: Any,
    tensors: CheckpointTensors,
    quantized: Mapping[str, StoredWeight],
    shard: Shard,
    **options: Any,
) -> tuple[Any, WeightSources]:
    """As `load_shard`, and where the shard's parts of the quantised weights come from."""
    rules = rules_of(config)
    _, num_kv_heads = num_heads_of(config)
    narrow = narrow_config(config, shard)
    elsewhere = {name for weight in quantized.values() for name in weight.names}
    plain = {
        name: part_of(tensors.slice(name), rule_of(name, rules), shard, num_kv_heads)
        for name in sorted(tensors.names - elsewhere)
    }
    parts = parts_of_weights(quantized, rules, shard, num_kv_heads)
    log.info("shard", index=shard.index, count=shard.count, quantised_weights=len(parts))
    return load_network(shard_class(network_class, shard), narrow, plain, parts, **options)


def parts_of_weights(
    weights: Mapping[str, StoredWeight], rules: Rules, shard: Shard, num_kv_heads: int
) -> dict[str, StoredWeight]:
    """The shard's part of each weight, by layer. ModelError if no rule has its name. Reading a part
    raises WrongSettingError if its inputs are not whole groups, or are in an order of their own."""
    return {
        layer: _part_of(layer, stored, rules, shard, num_kv_heads)
        for layer, stored in weights.items()
    }


def _part_of(
    layer: str, stored: StoredWeight, rules: Rules, shard: Shard, num_kv_heads: int
) -> StoredWeight:
    rule = rule_of(f"{layer}.weight", rules)
    if not isinstance(rule, Split):
        return stored
    kept = kept_range(stored.shape[rule.dim], rule, shard, num_kv_heads)
    shape = list(stored.shape)
    shape[rule.dim] = len(kept)
    read = _PartSource(layer, stored.read, rule.dim, kept, shard.count)
    return StoredWeight((shape[0], shape[1]), stored.names, read)


@dataclass(frozen=True)
class _PartSource:
    """Reads a weight and keeps a part of it."""

    layer: str
    whole: WeightSource
    dim: int
    kept: range  # of outputs or inputs
    num_ranks: int

    def __call__(self) -> QuantizedWeight:
        weight = self.whole()
        return self._outputs(weight) if self.dim == _OUTPUTS else self._inputs(weight)

    def _outputs(self, weight: QuantizedWeight) -> QuantizedWeight:
        """Of the vocabulary, outputs beyond its end are zeros."""
        return replace(
            weight,
            values=self._rows(weight.values),
            scales=self._rows(weight.scales),
            offsets=self._rows(weight.offsets),
        )

    def _rows(self, rows: Tensor) -> Tensor:
        part = rows[self.kept.start : self.kept.stop]
        # A copy, so that the whole can be freed.
        return pad(part, (0, 0, 0, len(self.kept) - len(part))).clone()

    def _inputs(self, weight: QuantizedWeight) -> QuantizedWeight:
        groups, group_size = self._groups(weight)
        return replace(
            weight,
            values=weight.values[:, self.kept.start : self.kept.stop].clone(),
            scales=weight.scales[:, groups].clone(),
            offsets=weight.offsets[:, groups].clone(),
            group_size=group_size,
        )

    def _groups(self, weight: QuantizedWeight) -> tuple[slice, int]:
        """Whole groups, or a part of one, which is then a group by itself."""
        first, size = self.kept.start, len(self.kept)
        if weight.permutation is not None:
            raise WrongSettingError(
                f"{_SETTING}: {self.num_ranks}, but the inputs of {self.layer} are in the order of "
                "act-order, in which a rank's part is not contiguous; use one rank"
            )
        if size % weight.group_size == 0:
            groups = slice(first // weight.group_size, (first + size) // weight.group_size)
            return groups, weight.group_size
        if weight.group_size % size == 0:
            group = first // weight.group_size
            return slice(group, group + 1), size
        raise WrongSettingError(
            f"{_SETTING}: {self.num_ranks}, but a rank's {size} inputs of {self.layer} are not "
            f"whole groups of {weight.group_size}; use another number of ranks"
        )
