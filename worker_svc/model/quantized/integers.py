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


def group_size_of(layer: str, num_inputs: int, num_groups: int) -> int:
    """ModelError if such groups do not divide the inputs."""
    if num_groups < 1 or num_inputs % num_groups:
        raise ModelError(f"{layer}: {num_groups} groups of {num_inputs} inputs")
    return num_inputs // num_groups


def permutation_of(layer: str, groups: Tensor, group_size: int) -> Tensor | None:
    """The inputs sorted by their group; None if they are sorted already, or if all groups are 0,
    which stands for no order. ModelError if the groups differ in size."""
    groups = groups.long()
    if not bool(groups.any()):
        return None
    sizes = torch.bincount(groups.clamp(min=0), minlength=len(groups) // group_size)
    if not bool((sizes == group_size).all()) or bool((groups < 0).any()):
        raise ModelError(f"{layer}: act-order with groups of other sizes than {group_size}")
    if bool((groups.diff() >= 0).all()):
        return None
    return groups.argsort(stable=True)
