"""The sampler's parameters of rows."""

from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.sampling import SamplingTensors
from worker_svc.logits.batch_cache import BatchCache
from worker_svc.plan.inputs import Ints
from worker_svc.plan.tables import RowTables
from worker_svc.runner.host_arrays import tensors_on

_NO_LINES: Final[Ints] = np.empty(0, np.int64)


class SamplingParams:
    """Those of the last batch of rows are kept: parameters of a row change when it is admitted."""

    def __init__(self, tables: RowTables, device: torch.device) -> None:
        self._tables = tables
        self._tensor = tensors_on(device)
        self._columns = BatchCache(lambda _, rows: self._columns_of(rows))

    def rows_have_changed(self) -> None:
        """To be called when rows were admitted."""
        self._columns.clear()

    def of(self, rows: Ints, positions: Ints) -> SamplingTensors:
        """For a token of each of the rows, at its position."""
        columns = self._columns.of(_NO_LINES, rows)
        return SamplingTensors(**columns, positions=self._tensor(positions))

    def _columns_of(self, rows: Ints) -> dict[str, Tensor]:
        """The fields of SamplingTensors but for the positions."""
        tables = self._tables
        columns: dict[str, NDArray[Any]] = {
            "temperatures": tables.temperatures,
            "top_ks": tables.top_ks,
            "top_ps": tables.top_ps,
            "min_ps": tables.min_ps,
            "seeds": tables.seeds.view(np.int64),
        }
        return {name: self._tensor(column[rows]) for name, column in columns.items()}
