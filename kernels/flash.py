"""FlashAttention over a paged cache.

Two libraries provide it: the package flash-attn, and torch with a copy of version 2, as
`torch.nn.attention.varlen.varlen_attn`. `kernels.flash_dispatch` decides when they can be used.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from kernels.flash_dispatch import FlashKind
from kernels.inputs.paged_batch import PagedBatch

_NO_WINDOW: Final = (-1, -1)


@dataclass(frozen=True)
class FlashBatch:
    """A batch in FlashAttention's form, made once for all layers of a step."""

    block_table: Tensor  # int32 [num_seqs, max_blocks]
    query_start_loc: Tensor  # int32 [num_seqs + 1]
    key_start_loc: Tensor  # int32 [num_seqs + 1], as if sequences' keys were contiguous
    seq_lens: Tensor  # int32 [num_seqs]
    max_query_len: int
    max_seq_len: int

    @classmethod
    def of(cls, batch: PagedBatch) -> "FlashBatch":
        """Convert a batch; wait for the device only if the batch has no maxima."""
        seq_lens = batch.seq_lens.to(torch.int32)
        return cls(
            block_table=batch.block_table,
            query_start_loc=batch.query_start_loc.to(torch.int32),
            key_start_loc=torch.nn.functional.pad(seq_lens.cumsum(0, dtype=torch.int32), (1, 0)),
            seq_lens=seq_lens,
            max_query_len=batch.longest_query,
            max_seq_len=batch.longest_seq,
        )

    def is_decode(self, num_tokens: int) -> bool:
        """Whether every sequence has one query, its last token."""
        return self.max_query_len == 1 and num_tokens == len(self.seq_lens)


class FlashAttention(Protocol):
    """`kernels.attention.paged_attention` for models that `choose_flash` accepts; returns a new
    tensor."""

    def __call__(
        self,
        query: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: FlashBatch,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor: ...


@dataclass(frozen=True)
class PackageFlash:
    """flash-attn: `flash_attn_with_kvcache` if all rows decode, which splits long sequences over
    the GPU and reads a key once for all heads that share it; else `flash_attn_varlen_func`."""

    varlen: Callable[..., Any]
    with_kvcache: Callable[..., Any]

    def __call__(
        self,
        query: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: FlashBatch,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        scores: dict[str, Any] = {
            "softmax_scale": scale,
            "causal": True,
            "window_size": _window(sliding_window, _NO_WINDOW),
            "softcap": softcap or 0.0,
            "block_table": batch.block_table,
        }
        out: Tensor
        if batch.is_decode(len(query)):
            out = self.with_kvcache(
                query.unsqueeze(1), k_cache, v_cache, cache_seqlens=batch.seq_lens, **scores
            ).squeeze(1)
        else:
            out = self.varlen(
                query,
                k_cache,
                v_cache,
                batch.query_start_loc,
                batch.key_start_loc,
                # With 1, flash-attn lays out heads that share a key for one token per row, which
                # fails for a row without a query.
                max(batch.max_query_len, 2),
                batch.max_seq_len,
                **scores,
            )
        return out


@dataclass(frozen=True)
class TorchFlash:
    """torch's `varlen_attn`, for decoded rows and prompts alike."""

    varlen: Callable[..., Any]

    def __call__(
        self,
        query: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: FlashBatch,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        if softcap is not None:
            raise ValueError("torch's varlen_attn has no soft-cap")
        # A last token sees all keys and needs no mask. Without one, keys are read once for all
        # heads that share them, and long sequences are split.
        unmasked = _NO_WINDOW if batch.is_decode(len(query)) else (-1, 0)
        out: Tensor = self.varlen(
            query,
            k_cache,
            v_cache,
            batch.query_start_loc,
            batch.key_start_loc,
            batch.max_query_len,
            batch.max_seq_len,
            scale=scale,
            window_size=_window(sliding_window, unmasked),
            enable_gqa=query.shape[1] != k_cache.shape[2],
            seqused_k=batch.seq_lens,
            block_table=batch.block_table,
        )
        return out


def _window(sliding_window: int | None, without: tuple[int, int]) -> tuple[int, int]:
    """Keys left and right of the query's own key, which `sliding_window` counts, too."""
    return without if sliding_window is None else (sliding_window - 1, 0)


class NoFlash(ImportError):
    """A library is missing or lacks a feature; the message names it."""


def find_flash() -> tuple[dict[FlashKind, FlashAttention], dict[FlashKind, str]]:
    """The kinds that are installed, and the reasons why the others are not."""
    found: dict[FlashKind, FlashAttention] = {}
    missing: dict[FlashKind, str] = {}
    loaders: dict[FlashKind, Callable[[], FlashAttention]] = {
        FlashKind.PACKAGE: _load_package,
        FlashKind.TORCH: _load_torch,
    }
    for kind, load in loaders.items():
        try:
            found[kind] = load()
        except Exception as error:
            # A library that was built for another torch may raise anything.
            missing[kind] = str(error)
    return found, missing


def _load_package() -> FlashAttention:
    try:
        package = import_module("flash_attn")
    except ModuleNotFoundError as error:
        if error.name != "flash_attn":
            raise
        raise NoFlash("not installed") from error
    what = f"flash-attn {getattr(package, '__version__', '')}"
    return PackageFlash(
        _entry(package, what, "flash_attn_varlen_func", ("softcap", "block_table")),
        _entry(package, what, "flash_attn_with_kvcache", ("softcap", "block_table")),
    )


def _load_torch() -> FlashAttention:
    module = import_module("torch.nn.attention.varlen")
    parameters = ("scale", "window_size", "enable_gqa", "seqused_k", "block_table")
    return TorchFlash(_entry(module, f"torch {torch.__version__}", "varlen_attn", parameters))


def _entry(module: Any, what: str, name: str, parameters: tuple[str, ...]) -> Callable[..., Any]:
    """Return a function of the module. NoFlash if it is missing or lacks a parameter."""
    function = getattr(module, name, None)
    if function is None:
        raise NoFlash(f"{what} has no {name}")
    return require_parameters(function, f"{what}: {name}", parameters)


def require_parameters(
    function: Callable[..., Any], what: str, parameters: tuple[str, ...]
) -> Callable[..., Any]:
    """Return the function. NoFlash if its signature lacks one of these parameters."""
    taken = inspect.signature(function).parameters
    if lacking := [name for name in parameters if name not in taken]:
        raise NoFlash(f"{what} takes no {', '.join(lacking)}")
    return function
