"""Rank 0's side of forward passes: sends the inputs of each pass before it runs it."""

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from worker_svc.gpu.step_arrays import StepArrays
from worker_svc.model.paged_attention import PagedAttention
from worker_svc.model.served_model import (
    AttentionFunction,
    BatchStates,
    SameProperties,
    ServedModel,
    StagesModel,
)
from worker_svc.plan.plans import BlockMoves
from worker_svc.ranks.group import RankGroup
from worker_svc.ranks.messages import Kind, Messages


class Leader:
    """Sends messages to the other ranks, which then do the same as this one."""

    def __init__(self, group: RankGroup) -> None:
        self.group = group
        self._messages = Messages(group.broadcast)

    @property
    def has_stages(self) -> bool:
        return self.group.num_stages > 1

    def send_moves(self, swap_outs: BlockMoves, swap_ins: BlockMoves, copies: BlockMoves) -> None:
        moves = (swap_outs, swap_ins, copies)
        if not any(len(each.sources) for each in moves):
            return
        ids = [array for each in moves for array in (each.sources, each.destinations)]
        self._messages.send(Kind.MOVES, ids)

    def send_pass(
        self, kind: Kind, attention: PagedAttention, ids: Tensor, positions: Tensor, indices: Tensor
    ) -> None:
        """The batch is the one that `attention` has."""
        batch, slot_mapping = attention.batch
        tensors = (
            *(ids, positions, indices, slot_mapping),
            *(batch.query_start_loc, batch.seq_lens, batch.block_table),
        )
        self._messages.send(kind, [tensor.numpy() for tensor in tensors])

    def send_head(self, indices: Tensor) -> None:
        self._messages.send(Kind.HEAD, [indices.numpy()])

    def send_step(self, step: StepArrays) -> None:
        """Of ranks on GPUs, which have block tables of their own."""
        if step.is_empty:
            return
        numbers = (step.num_tokens, step.graph_size, step.max_query_len, step.max_seq_len)
        arrays = (
            *step.forward.values(),
            *step.blocks.values(),
            *(step.logits_indices, step.prompt_indices, np.array(numbers)),
        )
        self._messages.send(Kind.STEP, arrays)

    def share_ids(self, ids: Tensor) -> None:
        self.group.share(ids)

    def stop(self) -> None:
        self._messages.send(Kind.STOP)
        self.group.flush()

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """For work that the other ranks were sent: if it fails here, they wait for this rank."""
        try:
            yield
        except Exception as error:
            self.group.lost(f"rank 0 failed in a forward pass: {error}")
            raise


class LeadingModel(SameProperties):
    """A `ServedModel` that all ranks run when rank 0 does."""

    def __init__(self, model: ServedModel, attention: PagedAttention, leader: Leader) -> None:
        """`model` is that of this rank."""
        super().__init__(model)
        self._model = model
        self._attention = attention
        self._leader = leader

    def set_attention(self, function: AttentionFunction) -> None:
        """TypeError unless it is the one that has the batches."""
        if function is not self._attention:
            raise TypeError("ranks run on the attention that was set when they were started")

    def logits(
        self,
        input_ids: Tensor,
        positions: Tensor,
        logits_indices: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        leader = self._leader
        leader.send_pass(Kind.LOGITS, self._attention, input_ids, positions, logits_indices)
        with leader.in_step():
            return self._model.logits(input_ids, positions, logits_indices, out)

    def begin_logits(
        self, input_ids: Tensor, positions: Tensor, logits_indices: Tensor
    ) -> Future[Tensor]:
        """As `logits`, which follow when all stages have run. TypeError unless there are stages."""
        leader, model = self._leader, self._model
        if not isinstance(model, StagesModel):
            raise TypeError("only a model of several stages runs passes side by side")
        leader.send_pass(Kind.LOGITS, self._attention, input_ids, positions, logits_indices)
        with leader.in_step():
            return model.begin_logits(input_ids, positions, logits_indices)

    def final_states(self, input_ids: Tensor, positions: Tensor) -> "LeadingStates":
        leader, none = self._leader, positions[:0]
        leader.send_pass(Kind.STATES, self._attention, input_ids, positions, none)
        with leader.in_step():
            return LeadingStates(self._model.final_states(input_ids, positions), leader)


@dataclass(frozen=True)
class LeadingStates:
    """`BatchStates` of which all ranks compute logits when rank 0 does."""

    own: BatchStates
    leader: Leader

    @property
    def states(self) -> Tensor:
        return self.own.states

    def logits(self, indices: Tensor) -> Tensor:
        self.leader.send_head(indices)
        with self.leader.in_step():
            return self.own.logits(indices)
