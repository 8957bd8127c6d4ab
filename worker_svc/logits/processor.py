"""The interface of logits processors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.dispatch import Implementation
from worker_svc.grammar.compiler import GrammarCompiler
from worker_svc.plan.failures import RowFailure
from worker_svc.plan.inputs import Ints
from worker_svc.plan.logits_params import LogitsParams


class LogitsError(ValueError):
    """A sequence whose logits cannot be changed as requested; the message is for its client."""


class FailedRows(Exception):
    """Rows that fail in `apply`, while the logits of the others were changed."""

    def __init__(self, failures: Mapping[int, RowFailure]) -> None:
        """`failures` by row."""
        super().__init__(f"rows {sorted(failures)} failed")
        self.failures = failures


@dataclass(frozen=True)
class ProcessorContext:
    """What a processor works for. It is created once, before the first sequence."""

    vocab_size: int  # of the logits, which may have more lines than the tokenizer has tokens
    max_num_seqs: int
    max_model_len: int
    device: torch.device
    implementation: Implementation  # of the kernels
    # Copies an array to `device` without waiting for it. The array may be changed afterwards.
    upload: Callable[[NDArray[Any]], Tensor]
    # None if the model has no tokenizer that the grammar library reads.
    grammars: GrammarCompiler | None = None


@runtime_checkable
class ForcingProcessor(Protocol):
    """What a processor adds to `LogitsProcessor` if it may leave a row only one token."""

    def forced_token(self, row: int) -> int | None:
        """The only possible next token of a row, if that is known without logits. It must be the
        token that sampling would give."""
        ...


@runtime_checkable
class PreparingProcessor(Protocol):
    """What a processor adds to `LogitsProcessor` if it prepares rows in threads."""

    def unready(self, rows: Ints, wait_s: float) -> list[int]:
        """Those of the rows that are not prepared, after waiting for one of them for at most so
        long. Rows with look-ahead do not sample until they are; for others `apply` waits."""
        ...


@runtime_checkable
class OverlappingProcessor(Protocol):
    """What a processor adds to `LogitsProcessor` if it can begin `apply` before the logits are
    there: beside the end of a step and the next forward pass."""

    def begin_apply(self, rows: Ints) -> None:
        """Start in a thread what `apply` needs of these rows, which have got their tokens. No
        token is appended before `apply`, which may be called for other rows, or not at all if the
        step fails; rows may be released and admitted."""
        ...


class LogitsProcessor(Protocol):
    """Changes the logits of the rows that request it.

    A row's state must be a function of its parameters and tokens alone, because a sequence may be
    admitted again at any token, by any worker. The same holds for the change: it must not depend on
    other rows of the batch. All methods are called on one thread, the one that launches steps, and
    none of them may wait for the device.
    """

    needs_token_ids: bool
    """Whether `apply` needs all tokens of its rows on the host.

    If so, a GPU's launch waits for the tokens of the previous step, after the forward pass was
    queued. If not, `append` gets tokens that are only on the device."""

    def admit(
        self, row: int, params: LogitsParams, token_ids: Ints, num_prompt_tokens: int
    ) -> bool:
        """A sequence gets the row, with all its tokens so far. Return whether this processor
        changes its logits: if not, nothing more is called for the row. LogitsError if the
        parameters are invalid."""
        ...

    def release(self, row: int) -> None:
        """The sequence has ended or was preempted."""
        ...

    def append(self, token_ids: Tensor, lines: Ints, rows: Ints) -> None:
        """A token was sampled in each row: `token_ids[lines[i]]`, int64, in row `rows[i]`.

        With `needs_token_ids`, tokens are on the host, and rows that failed are left out. Else they
        are on the device, and negative in rows that failed, whose logits do not matter any
        more.

        After an error all these rows fail when they sample again; only `release` is called for them
        until then."""
        ...

    def apply(self, logits: Tensor, lines: Ints, rows: Ints) -> None:
        """Change `logits` (float32 `[num_lines, vocab_size]`, on the device) in place: line
        `lines[i]` is that of row `rows[i]`. Lines are in ascending order, and all are different.
        FailedRows if some cannot go on."""
        ...
