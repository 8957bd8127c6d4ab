"""Which layers of a model a rank has."""

from dataclasses import dataclass
from typing import Final

from worker_svc.errors import WrongSettingError
from worker_svc.model.stages.division import divide

_STAGES: Final = "--pipeline-parallel-size / QUIRE_WORKER_PIPELINE_PARALLEL_SIZE"
_LAYERS: Final = "--pipeline-layers / QUIRE_WORKER_PIPELINE_LAYERS"


@dataclass(frozen=True)
class Stage:
    """One of `count` runs of consecutive layers."""

    index: int
    count: int
    # The number of layers of each stage; None: about equal costs.
    num_layers: tuple[int, ...] | None = None

    @property
    def is_first(self) -> bool:
        """It has the embedding."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """It has the last norm and the head."""
        return self.index == self.count - 1

    def layers(self, num_layers: int, head_cost: float) -> range:
        """Of a model with so many layers, whose head costs as much as `head_cost` layers.
        WrongSettingError if it cannot be divided as the settings say."""
        counts = self._counts(num_layers, head_cost)
        first = sum(counts[: self.index])
        return range(first, first + counts[self.index])

    def _counts(self, num_layers: int, head_cost: float) -> tuple[int, ...]:
        if self.num_layers is None:
            try:
                return divide(num_layers, self.count, head_cost)
            except ValueError as error:
                raise WrongSettingError(
                    f"{_STAGES}: {error}; set it to {num_layers} or less"
                ) from error
        if (total := sum(self.num_layers)) != num_layers:
            given = ",".join(map(str, self.num_layers))
            raise WrongSettingError(
                f"{_LAYERS}: {given} is {total} layers, but the model has {num_layers}"
            )
        return self.num_layers
