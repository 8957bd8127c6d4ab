"""A `ServedModel` of which this process has a shard."""

from torch import Tensor

from worker_svc.model.loading import LoadedModel
from worker_svc.model.served_model import AttentionFunction, FinalStates, SameProperties
from worker_svc.ranks.group import RankGroup


class ShardedModel(SameProperties):
    """All ranks have to make the same calls. Logits are those of the whole vocabulary on rank 0,
    those of the shard on the others. They are valid until the next pass."""

    def __init__(self, shard: LoadedModel, group: RankGroup) -> None:
        super().__init__(shard)
        self._shard = shard
        self._group = group

    def set_attention(self, function: AttentionFunction) -> None:
        self._shard.set_attention(function)

    def logits(
        self,
        input_ids: Tensor,
        positions: Tensor,
        logits_indices: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        columns = self._columns(logits_indices)
        if columns is not None:
            self._shard.logits(input_ids, positions, logits_indices, columns)
            logits = self._group.gathered(columns, self.vocab_size)
        else:
            part = self._shard.own_logits(input_ids, positions, logits_indices)
            logits = self._gather(part).float()
        return logits if out is None else out.copy_(logits)

    def final_states(self, input_ids: Tensor, positions: Tensor) -> FinalStates:
        final = self._shard.final_states(input_ids, positions)

        def head(states: Tensor) -> Tensor:
            part = final.head(states)[0]
            columns = self._columns(part)
            if columns is None:
                return self._gather(part).unsqueeze(0)
            return self._group.gathered(columns.copy_(part), self.vocab_size).unsqueeze(0)

        return FinalStates(final.states, head)

    def _columns(self, lines: Tensor) -> Tensor | None:
        """Memory for this rank's logits of so many tokens, if ranks share it."""
        return self._group.columns(len(lines), len(self._group.shard.rows(self.vocab_size)))

    def _gather(self, part: Tensor) -> Tensor:
        """The last rank's part may go beyond the end of the vocabulary."""
        return self._group.gather(part, self.vocab_size)
