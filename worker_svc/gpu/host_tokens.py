"""Tokens of launched steps for the logits processors that need them on the host."""

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from kernels.sampling import NO_TOKEN
from worker_svc.gpu.streams import PendingCopies
from worker_svc.logits.pipeline import LogitsPipeline
from worker_svc.plan.inputs import Ints


@dataclass(frozen=True)
class _Step:
    number: int
    rows: Ints  # that sampled
    num_releases: Ints  # of these rows, when the step was launched
    results: PendingCopies  # the tokens first


class HostTokens:
    """Passes tokens on in the order of their steps: when a step's output is read, or before, when
    a processor needs them."""

    def __init__(self, processors: LogitsPipeline) -> None:
        self._processors = processors
        self._unread: deque[_Step] = deque()
        self._last_number = 0

    def add(self, rows: Ints, results: PendingCopies) -> int:
        """A launched step. Returns its number."""
        self._last_number += 1
        if self._processors.needs_token_ids(rows):
            num_releases = self._processors.num_releases(rows)
            self._unread.append(_Step(self._last_number, rows, num_releases, results))
        return self._last_number

    def read(self, last: int | None = None) -> None:
        """Wait for the tokens of all steps, or up to number `last`."""
        while self._unread and (last is None or self._unread[0].number <= last):
            step = self._unread.popleft()
            token_ids = step.results.arrays()[0]
            # The row of a sequence that was released since may have another one.
            kept = self._processors.num_releases(step.rows) == step.num_releases
            kept &= token_ids > NO_TOKEN
            tokens = torch.from_numpy(np.ascontiguousarray(token_ids[kept]))
            self._processors.append_on_host(step.rows[kept], tokens)

    def clear(self) -> None:
        self._unread.clear()
