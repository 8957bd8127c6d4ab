"""Counts the weights of a network as they are packed."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from torch import nn

from worker_svc.model.load_progress import LoadProgress
from worker_svc.model.mapped_files import MappedFiles

# The number of a layer in the name of a module: `model.layers.3.mlp.up_proj`.
_LAYER: Final = re.compile(r"\.(\d+)\.")


class WeightProgress:
    """Reports layers and bytes, and releases the pages of files whose weights were packed."""

    def __init__(
        self,
        action: str,
        network: nn.Module,
        weights: Iterable[list[nn.Module]],
        progress: LoadProgress | None,
        files: Iterable[Path],
    ) -> None:
        """`weights` has the modules of each weight. Without `progress` nothing is reported."""
        self._action = action
        self._progress = progress or LoadProgress()
        self._files = MappedFiles(files)
        self._layers = {
            module: int(found[1]) + 1
            for name, module in network.named_modules()
            if (found := _LAYER.search(name))
        }
        self._num_layers = max(self._layers.values(), default=0)
        self._total = sum(_num_bytes(users) for users in weights)
        self._done = self._last = 0

    def begin(self, users: list[nn.Module]) -> None:
        """The weight of these modules is packed next, those before it are done."""
        layer = self._layers.get(users[0], 0)
        self._progress.count_layers(self._action, layer, self._num_layers, self._done, self._total)
        self._files.converted(self._last)
        self._last = _num_bytes(users)
        self._done += self._last


def _num_bytes(users: list[nn.Module]) -> int:
    """Of their weight, in the network's type."""
    return sum(own.numel() * own.element_size() for own in users[0].parameters(recurse=False))
