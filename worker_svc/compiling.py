"""A model compiled by torch: what stands between its products becomes few operations.

Attention stays as it is, as one operation that the compiler does not look into: it knows of a step
what is no argument, and writes to a cache that is none.
"""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import structlog
import torch
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit

from kernels.attention import PagedBatch
from worker_svc.attention import AttentionFunction, PagedAttention
from worker_svc.model import LoadedModel
from worker_svc.settings import WrongSettingError

log = structlog.get_logger()

# Of tokens: one is compiled for itself, and all other numbers together, for which this one is the
# example.
_EXAMPLE: Final = 256


def compile_model(
    model: LoadedModel, attention: PagedAttention, block_size: int, backend: str = "inductor"
) -> None:
    """Compiles the model, which attends with `attention` from now on, for every number of tokens;
    takes a minute or so. `backend` is torch's name of a compiler.

    WrongSettingError, with the reason, if torch cannot compile it as one piece;
    torch.OutOfMemoryError.
    """
    began = time.monotonic()
    model.attend_with(attention_operation(attention))
    base = model.network.base_model
    base.forward = CompiledForward(
        torch.compile(base.forward, fullgraph=True, dynamic=True, backend=backend)
    )
    try:
        for num_tokens in (min(_EXAMPLE, model.max_model_len), 1):
            _run(model, attention, block_size, num_tokens)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, FailOnRecompileLimitHit) as error:
        reason = str(error).partition("\n")[0].rstrip(". ")
        raise WrongSettingError(
            f"--enable-torch-compile: torch cannot compile {type(model.network).__name__}: "
            f"{reason}; do without it"
        ) from error
    log.info("compiled by torch", seconds=round(time.monotonic() - began, 1))


@dataclass(frozen=True)
class CompiledForward:
    """The forward pass of a model without its head."""

    compiled: Callable[..., Any]

    def __call__(self, *args: Any, position_ids: Tensor, **named: Any) -> Any:
        # Where in a buffer a tensor begins may become part of what is compiled for.
        return self.compiled(*args, position_ids=position_ids.clone(), **named)


def attention_operation(attention: PagedAttention) -> AttentionFunction:
    """An attention function that calls `attention` through an operation of torch.

    That the operation changes caches is nothing the compiler has to know: each needs what the one
    before it gave, so their order stays, and nobody else reads caches.
    """

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None,
        sliding_window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        out, _ = attention(
            None,
            query,
            key,
            value,
            None,
            scaling=scaling,
            sliding_window=sliding_window,
            softcap=softcap,
            s_aux=sinks,
        )
        return out

    name = f"quire::attention_{secrets.token_hex(8)}"
    operation = torch.library.custom_op(name, attend, mutates_args=())

    @operation.register_fake
    def _like(query: Tensor, key: Tensor, value: Tensor, *unused: object) -> Tensor:
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])

    def function(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **unused: object,
    ) -> tuple[Tensor, None]:
        return operation(query, key, value, scaling, sliding_window, softcap, s_aux), None

    return function


@torch.inference_mode()
def _run(model: LoadedModel, attention: PagedAttention, block_size: int, num_tokens: int) -> None:
    """A prompt without slots, whose keys are the null block's, which may hold anything."""
    device = model.device
    numbers = torch.arange(num_tokens, device=device)
    ends = torch.tensor([0, num_tokens], device=device)
    width = -(-num_tokens // block_size)
    batch = PagedBatch(
        block_table=torch.zeros(1, width, dtype=torch.int32, device=device),
        query_start_loc=ends,
        seq_lens=ends[1:],
        block_size=block_size,
        max_query_len=num_tokens,
        max_seq_len=num_tokens,
    )
    attention.begin(batch, torch.full_like(numbers, -1))
    model.logits(torch.zeros_like(numbers), numbers, numbers[-1:])
