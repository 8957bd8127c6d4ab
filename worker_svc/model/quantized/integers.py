"""Integers as checkpoints store them: several in one, and in any order of inputs."""

import sys
from typing import Final

import torch
from torch import Tensor

from worker_svc.model.checkpoint import ModelError

FLOATS: Final = ("F16", "BF16", "F32")


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The 4- or 8-bit integers of an int32 `[rows, columns]`, the lowest bits of each first: uint8
    `[rows, columns * 32 // bits]`."""
    assert sys.byteorder == "little"
    unpacked = packed.contiguous().view(torch.uint8)
    return unpacked if bits == 8 else split_bytes(unpacked).flatten(1)


def split_bytes(pairs: Tensor) -> Tensor:
    """The lower and the upper four bits of each byte, in a last dimension of two."""
    return torch.stack([pairs & 15, pairs >> 4], -1)


def group_size_of(scales: str, num_inputs: int, num_groups: int, configured: int | None) -> int:
    """The inputs in each group of the scales of that name. The config's group size is -1 for one
    group, and None if it has none. ModelError if the scales, or the inputs, do not fit to it."""
    if num_groups < 1 or num_inputs < 1:
        raise ModelError(f"{scales}: {num_groups} groups of {num_inputs} inputs")
    size = num_inputs if configured == -1 else configured
    if size is None:
        if num_inputs % num_groups:
            raise ModelError(f"{scales}: {num_groups} groups of {num_inputs} inputs")
        return num_inputs // num_groups
    if size < 1:
        raise ModelError(f"{scales}: group_size {size} in the config; correct it")
    if num_inputs % size:
        raise ModelError(
            f"{scales}: by the config a group has {size} inputs, which does not divide the layer's "
            f"{num_inputs}; quantise the model with a group_size that does, or without this layer"
        )
    if num_groups * size != num_inputs:
        raise ModelError(
            f"{scales}: {num_groups} groups of {num_inputs} inputs, so {num_inputs / num_groups:g} "
            f"in a group, but by the config a group has {size}; "
            "correct the config, or quantise the model again"
        )
    return size


def permutation_of(layer: str, groups: Tensor, group_size: int) -> Tensor | None:
    """The inputs sorted by their group; None if they are sorted already, or if all groups are 0,
    which stands for no order. ModelError if the groups differ in size."""
    groups = groups.long()
    if not bool(groups.any()):
        return None
    num_groups = len(groups) // group_size
    # bincount allocates memory up to the largest value.
    in_range = bool(((groups >= 0) & (groups < num_groups)).all())
    if not in_range or bool((groups.bincount(minlength=num_groups) != group_size).any()):
        raise ModelError(f"{layer}: act-order with groups of other sizes than {group_size}")
    if bool((groups.diff() >= 0).all()):
        return None
    return groups.argsort(stable=True)
