"""A `ServedModel` of which this process has a stage."""

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from worker_svc.model.loading import LoadedModel
from worker_svc.model.served_model import AttentionFunction, FinalStates, SameProperties
from worker_svc.model.stages.joining import Inlet
from worker_svc.model.stages.stage import Stage
from worker_svc.ranks.group import RankGroup
from worker_svc.ranks.stage_links import StageLinks


class StagedModel(SameProperties):
    """All ranks have to make the same calls. Logits are known on rank 0 alone."""

    def __init__(self, part: LoadedModel, stage: Stage, inlet: Inlet, group: RankGroup) -> None:
        """`part` is a shard of the stage, joined by `inlet`. The group may not be connected yet."""
        super().__init__(part)
        self._part = part
        self._stage = stage
        self._inlet = inlet
        self._group = group

    @property
    def _links(self) -> StageLinks:
        assert self._group.links is not None
        return self._group.links

    def set_attention(self, function: AttentionFunction) -> None:
        self._part.set_attention(function)

    def logits(
        self,
        input_ids: Tensor,
        positions: Tensor,
        logits_indices: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        logits = self.begin_logits(input_ids, positions, logits_indices).result()
        return logits if out is None else out.copy_(logits)

    def begin_logits(
        self, input_ids: Tensor, positions: Tensor, logits_indices: Tensor
    ) -> Future[Tensor]:
        """Run this stage; the logits follow when all stages have run."""
        if not self._stage.is_last:
            self._run(input_ids, positions)
            return self._receive(len(logits_indices))
        ids = self._continued(input_ids)
        self._links.send_logits(self._part.own_logits(ids, positions, logits_indices).float())
        return self._nothing()

    def final_states(self, input_ids: Tensor, positions: Tensor) -> "StagedStates":
        if not self._stage.is_last:
            return StagedStates(self, self._run(input_ids, positions), None)
        final = self._part.final_states(self._continued(input_ids), positions)
        return StagedStates(self, final.states, final)

    def head(self, final: FinalStates | None, indices: Tensor) -> Tensor:
        """Logits of these tokens of a batch, of which the last stage has the final states."""
        if final is None:
            return self._receive(len(indices)).result()
        self._links.send_logits(final.logits(indices))
        return self._nothing().result()

    def _run(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """The states behind this stage's layers, which the next stage gets."""
        states = self._part.final_states(self._continued(input_ids), positions).states
        self._links.send_states(states.to(self.dtype))
        return states

    def _continued(self, input_ids: Tensor) -> Tensor:
        """The ids for this stage. Behind the first one, any that its stand-in has."""
        if self._stage.is_first:
            return input_ids
        self._inlet.states = self._links.receive_states(
            len(input_ids), self._hidden_size, self.dtype
        ).unsqueeze(0)
        return torch.zeros_like(input_ids)

    def _receive(self, num_rows: int) -> Future[Tensor]:
        if not self._links.has_logits:
            return self._nothing()
        return self._links.receive_logits(num_rows, self.vocab_size)

    def _nothing(self) -> Future[Tensor]:
        nothing: Future[Tensor] = Future()
        nothing.set_result(torch.empty(0, self.vocab_size))
        return nothing

    @property
    def _hidden_size(self) -> int:
        config: Any = self._part.network.config
        size: int = config.get_text_config().hidden_size
        return size


@dataclass(frozen=True)
class StagedStates:
    """`BatchStates` that the last stage has; other stages have those behind their own layers."""

    model: StagedModel
    states: Tensor
    final: FinalStates | None

    def logits(self, indices: Tensor) -> Tensor:
        return self.model.head(self.final, indices)
