"""Adds values to the logits of chosen tokens."""

from torch import Tensor

from worker_svc.logits.processor import ProcessorContext
from worker_svc.logits.row_entries import RowEntries
from worker_svc.plan.inputs import Ints
from worker_svc.plan.logits_params import LogitsParams


class LogitBias:
    """`logit_bias`, as OpenAI's API defines it."""

    needs_token_ids = False

    def __init__(self, context: ProcessorContext) -> None:
        self._entries = RowEntries(context)

    def admit(
        self, row: int, params: LogitsParams, token_ids: Ints, num_prompt_tokens: int
    ) -> bool:
        return self._entries.set(row, params.bias_token_ids, params.biases)

    def release(self, row: int) -> None:
        self._entries.remove(row)

    def append(self, token_ids: Tensor, lines: Ints, rows: Ints) -> None:
        """The change does not depend on tokens."""

    def apply(self, logits: Tensor, lines: Ints, rows: Ints) -> None:
        entries = self._entries.of(lines, rows)
        places = entries.lines, entries.token_ids
        logits.index_put_(places, logits[places] + entries.values)
