"""Chooses the FlashAttention for a model, with reasons: pure functions."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import torch

from kernels.dispatch import NoSuchKernel

_BLOCK_SIZE_UNIT: Final = 256
_LARGEST_HEAD: Final = 256
_DTYPES: Final = (torch.float16, torch.bfloat16)
# Earlier GPUs have no kernel of version 2.
_LEAST_CAPABILITY: Final = (8, 0)


class FlashKind(StrEnum):
    """A FlashAttention library, by its name in settings and logs."""

    PACKAGE = "flash-attn"
    TORCH = "torch-varlen"


# `auto` is the first kind that can be used, `paged` none.
FLASH_SETTINGS: Final = ("auto", "paged", *FlashKind)


@dataclass(frozen=True)
class AttentionNeeds:
    """A model's requirements of attention, and where it runs."""

    device_type: str
    capability: tuple[int, int] | None  # of a CUDA device
    dtype: torch.dtype  # of queries
    cache_dtype: torch.dtype
    block_size: int
    head_dims: frozenset[tuple[int, int]]  # of keys and of values, over all layers
    has_softcap: bool = False
    has_sinks: bool = False
    kernels: str = "auto"  # the kernels' setting; unless `auto`, no FlashAttention is chosen


@dataclass(frozen=True)
class FlashChoice:
    """The chosen kind, if any, and the reasons against the others."""

    kind: FlashKind | None
    reasons: Mapping[FlashKind, str]


def choose_flash(
    needs: AttentionNeeds, missing: Mapping[FlashKind, str], setting: str = "auto"
) -> FlashChoice:
    """Choose the first kind that can be used. `missing` has the reasons why a kind is not
    installed; `setting` is one of FLASH_SETTINGS. NoSuchKernel with the reason if the named kind
    cannot be used."""
    if setting == "paged":
        return FlashChoice(None, dict.fromkeys(FlashKind, "the setting is paged"))
    if setting != "auto":
        named = FlashKind(setting)
        if reason := _refusal(named, needs) or missing.get(named):
            raise NoSuchKernel(f"{named}: {reason}")
        others = [kind for kind in FlashKind if kind != named]
        return FlashChoice(named, dict.fromkeys(others, f"the setting is {named}"))
    if needs.kernels != "auto":
        return FlashChoice(None, dict.fromkeys(FlashKind, f"the kernels are set: {needs.kernels}"))
    chosen: FlashKind | None = None
    reasons: dict[FlashKind, str] = {}
    for kind in FlashKind:
        if chosen is not None:
            reasons[kind] = f"{chosen} goes first"
        elif reason := _refusal(kind, needs) or missing.get(kind):
            reasons[kind] = reason
        else:
            chosen = kind
    return FlashChoice(chosen, reasons)


def _refusal(kind: FlashKind, needs: AttentionNeeds) -> str | None:
    """Why this kind cannot be used; None if it can."""
    return next(_refusals(kind, needs), None)


def _refusals(kind: FlashKind, needs: AttentionNeeds) -> Iterator[str]:
    if needs.device_type != "cuda":
        yield f"does not run on {needs.device_type}"
    if needs.capability is not None and needs.capability < _LEAST_CAPABILITY:
        yield f"needs compute capability 8.0, the GPU has {'.'.join(map(str, needs.capability))}"
    if needs.block_size % _BLOCK_SIZE_UNIT:
        yield f"needs blocks of a multiple of {_BLOCK_SIZE_UNIT} tokens, not {needs.block_size}"
    if needs.dtype not in _DTYPES:
        yield f"computes in float16 and bfloat16, not in {_name(needs.dtype)}"
    if needs.cache_dtype != needs.dtype:
        yield f"reads no cache of {_name(needs.cache_dtype)} with queries of {_name(needs.dtype)}"
    for key_dim, value_dim in sorted(needs.head_dims):
        if key_dim != value_dim:
            yield f"keys of {key_dim} numbers have values of {value_dim}"
        if key_dim % 8 or key_dim > _LARGEST_HEAD:
            yield f"heads of {key_dim} numbers are no multiple of 8 up to {_LARGEST_HEAD}"
    if needs.has_sinks:
        yield "the model has attention sinks"
    if needs.has_softcap and kind == FlashKind.TORCH:
        yield "the model has a soft-cap"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
