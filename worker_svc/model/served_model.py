"""What the runners need of a model, however it was loaded."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from worker_svc.cache.kv_pool import AttentionSpecs

# Called with a module, then query, key and value as `[1, heads, num_tokens, dim]`.
AttentionFunction = Callable[..., tuple[Tensor, None]]


@dataclass(frozen=True)
class FinalStates:
    """Final hidden states of a flat batch."""

    states: Tensor  # [num_tokens, hidden_size]
    head: Callable[[Tensor], Tensor]  # of states [1, any, hidden_size]: logits of the same shape

    def logits(self, indices: Tensor) -> Tensor:
        """Float32 `[len(indices), vocab_size]` of these tokens."""
        flat: Tensor = self.head(self.states.index_select(0, indices).unsqueeze(0))[0]
        return flat.float()


class BatchStates(Protocol):
    """Final hidden states of a flat batch, of which logits can be computed."""

    @property
    def states(self) -> Tensor:
        """`[num_tokens, hidden_size]`."""
        ...

    def logits(self, indices: Tensor) -> Tensor:
        """Float32 `[len(indices), vocab_size]` of these tokens."""
        ...


class ServedModel(Protocol):
    """A model in memory and its properties."""

    @property
    def layers(self) -> AttentionSpecs:
        """Of attention, in the order of calls."""
        ...

    @property
    def num_earlier_layers(self) -> int:
        """Of attention, in the stages before this one."""
        ...

    @property
    def num_later_layers(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def fingerprint(self) -> bytes: ...

    @property
    def weights(self) -> tuple[Path, ...]:
        """Safetensors files, or one of GGUF."""
        ...

    @property
    def vocab_size(self) -> int: ...

    def set_attention(self, function: AttentionFunction) -> None:
        """Replace the attention function of every layer."""
        ...

    def logits(
        self,
        input_ids: Tensor,
        positions: Tensor,
        logits_indices: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        """Float32 `[len(logits_indices), vocab_size]` of a flat batch; in `out` if given."""
        ...

    def final_states(self, input_ids: Tensor, positions: Tensor) -> BatchStates:
        """As `logits`, with the head still to be run."""
        ...


@runtime_checkable
class StagesModel(Protocol):
    """A model whose later layers are in other processes."""

    def begin_logits(
        self, input_ids: Tensor, positions: Tensor, logits_indices: Tensor
    ) -> Future[Tensor]:
        """As `ServedModel.logits`, which follow when all stages have run."""
        ...


class SameProperties:
    """The properties of a `ServedModel`, for another one that runs it with more ranks."""

    def __init__(self, model: ServedModel) -> None:
        self.layers = model.layers
        self.num_earlier_layers = model.num_earlier_layers
        self.num_later_layers = model.num_later_layers
        self.dtype = model.dtype
        self.device = model.device
        self.max_model_len = model.max_model_len
        self.fingerprint = model.fingerprint
        self.weights = model.weights
        self.vocab_size = model.vocab_size
