"""Compiles a model by torch.compile, which fuses the operations between its products.

Attention is one opaque operation for the compiler: it uses state of the step that is not among its
arguments, and writes to the cache.
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
from worker_svc.errors import WrongSettingError
from worker_svc.model.loading import LoadedModel
from worker_svc.model.paged_attention import PagedAttention
from worker_svc.model.served_model import AttentionFunction

log = structlog.get_logger()

# torch compiles one token separately, and all other numbers of tokens together, by this example.
_EXAMPLE_TOKENS: Final = 256


def compile_model(
    model: LoadedModel, attention: PagedAttention, block_size: int, backend: str = "inductor"
) -> None:
    """Set the model's attention to `attention` and compile it for every number of tokens,
    which takes about a minute. `backend` is torch's name of a compiler.

    WrongSettingError, with the reason, if torch cannot compile it without graph breaks;
    torch.OutOfMemoryError.
    """
    began = time.monotonic()
    model.set_attention(attention_operation(attention))
    base = model.network.base_model
    base.forward = CompiledForward(
        torch.compile(base.forward, fullgraph=True, dynamic=True, backend=backend)
    )
    try:
        for num_tokens in (min(_EXAMPLE_TOKENS, model.max_model_len), 1):
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
        # Cloned because torch may specialise on a tensor's offset in its buffer.
        return self.compiled(*args, position_ids=position_ids.clone(), **named)


def attention_operation(attention: PagedAttention) -> AttentionFunction:
    """An attention function that calls `attention` through a custom operation.

    The operation is not declared to mutate the caches. Its calls keep their order, because each
    depends on the result of the previous one, and no other operation reads the caches.
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
    """Run a prompt that writes no slot and reads the null block."""
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
    attention.set_batch(batch, torch.full_like(numbers, -1))
    model.logits(torch.zeros_like(numbers), numbers, numbers[-1:])
