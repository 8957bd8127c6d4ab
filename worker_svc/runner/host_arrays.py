"""Puts arrays that the host has prepared on the device."""

from collections.abc import Callable
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def tensors_on(device: torch.device) -> Callable[[NDArray[Any]], Tensor]:
    """Return the function that makes a tensor of an array: on a CPU it shares the array's memory,
    elsewhere it is a copy that is complete when the call returns."""
    if device.type == "cpu":
        # Without the call of `to`, whose overhead is significant in a small step.
        return torch.from_numpy
    return lambda array: torch.from_numpy(array).to(device)
