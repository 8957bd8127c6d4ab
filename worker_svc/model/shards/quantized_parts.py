"""Parts of the weights that a checkpoint has quantised.

A weight is read whole and converted to `QuantizedWeight`, in which the parts of all formats are
cut alike: scales and offsets follow outputs and groups of inputs. Weights are read one at a time,
when they are packed, so a rank keeps no more than its part.
"""

from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.quantized import QuantizedWeight, quantize
from worker_svc.errors import WrongSettingError
from worker_svc.model.quantized.checkpoint_tensors import StoredWeight
from worker_svc.model.quantized.sources import WeightSource
from worker_svc.model.shards.shard import Shard
from worker_svc.model.shards.splits import Rule, Split, kept_range

_SETTING: Final = "--tensor-parallel-size / QUIRE_WORKER_TENSOR_PARALLEL_SIZE"
_OUTPUTS: Final = 0


def part_of_weight(
    layer: str, stored: StoredWeight, rule: Rule, shard: Shard, num_kv_heads: int
) -> StoredWeight:
    """The shard's part. Reading it raises WrongSettingError if its inputs are not whole groups, or
    are in an order of their own."""
    if not isinstance(rule, Split) or shard.count == 1:
        return stored
    kept = kept_range(stored.shape[rule.dim], rule, shard, num_kv_heads)
    shape = list(stored.shape)
    shape[rule.dim] = len(kept)
    read = _PartSource(layer, stored.read, rule.dim, kept, shard.count)
    return replace(stored, shape=(shape[0], shape[1]), read=read)


def stand_in_weight(num_outputs: int, stored: StoredWeight) -> StoredWeight:
    """Random outputs in place of an embedding or a head that another stage has. Nothing is read:
    formats that pack several outputs in one integer could not be read in part."""
    shape = (num_outputs, stored.shape[1])

    def read() -> QuantizedWeight:
        return quantize(torch.randn(shape, generator=torch.Generator().manual_seed(0)), 8)

    return replace(stored, shape=shape, read=read)


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
