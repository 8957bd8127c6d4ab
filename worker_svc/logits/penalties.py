"""Penalties for the repetition of tokens."""

import numpy as np
import torch
from torch import Tensor

from kernels.logits import apply_penalties
from worker_svc.logits.processor import ProcessorContext
from worker_svc.logits.slots import Slots, grown
from worker_svc.plan.inputs import Ints
from worker_svc.plan.logits_params import LogitsParams


def largest_counts_bytes(max_num_seqs: int, vocab_size: int) -> int:
    """The most memory of counts: a table for all rows, beside the smaller one that it replaces,
    whose number of lines is a power of two."""
    num_before = 1 << (max_num_seqs - 1).bit_length() >> 1
    return (max_num_seqs + num_before) * vocab_size * 4


class Penalties:
    """`repetition_penalty` over prompt and output, `frequency_penalty` and `presence_penalty` over
    the output, as vLLM defines them.

    Tokens are counted on the device, in a line of the vocabulary's size per row with a penalty.
    """

    needs_token_ids = False

    def __init__(self, context: ProcessorContext) -> None:
        self._context = context
        self._slots = Slots(context)
        # Twice the number in the output, plus 1 if the prompt has the token.
        self._counts = torch.empty(0, context.vocab_size, dtype=torch.int32, device=context.device)
        self._penalties = torch.empty(0, 3, device=context.device)

    def admit(
        self, row: int, params: LogitsParams, token_ids: Ints, num_prompt_tokens: int
    ) -> bool:
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        if penalties == (1, 0, 0):
            return False
        with self._slots.take(row) as slot:
            self._write_line(slot, penalties, token_ids, num_prompt_tokens)
        return True

    def _write_line(
        self, slot: int, penalties: tuple[float, ...], token_ids: Ints, num_prompt_tokens: int
    ) -> None:
        upload, most = self._context.upload, self._context.max_num_seqs
        self._counts = grown(self._counts, slot + 1, most)
        self._penalties = grown(self._penalties, slot + 1, most)
        self._penalties[slot].copy_(upload(np.array(penalties, np.float32)))
        counts = self._counts[slot].zero_()
        prompt, output = (
            upload(tokens[tokens < self._context.vocab_size])
            for tokens in (token_ids[:num_prompt_tokens], token_ids[num_prompt_tokens:])
        )
        counts.index_fill_(0, prompt, 1)
        counts.index_add_(0, output, torch.full_like(output, 2, dtype=torch.int32))

    def release(self, row: int) -> None:
        self._slots.give_back(row)

    def append(self, token_ids: Tensor, lines: Ints, rows: Ints) -> None:
        batch = self._slots.of(lines, rows)
        tokens = token_ids.index_select(0, batch.lines)
        places = batch.slots * self._context.vocab_size + tokens.clamp_min(0)
        # A row without a token has failed: its counts do not matter.
        twice = torch.full_like(places, 2, dtype=torch.int32)
        self._counts.view(-1).index_add_(0, places, twice)

    def apply(self, logits: Tensor, lines: Ints, rows: Ints) -> None:
        batch = self._slots.of(lines, rows)
        apply_penalties(
            logits,
            self._counts,
            batch.lines,
            batch.slots,
            self._penalties,
            implementation=self._context.implementation,
        )
