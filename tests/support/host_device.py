"""A device that is the host: its streams and its graphs, for what runs on a GPU elsewhere."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from numpy.typing import NDArray
from torch import Tensor

from worker_svc.engine import Engine
from worker_svc.graphs import Capturer, Replay
from worker_svc.pipelined_runner import PipelinedRunner
from worker_svc.rounds import RoundsRunner
from worker_svc.runner import Runner
from worker_svc.runners import start_pipelined

_MOST_ASKED = 3


class HostStreams:
    """Everything is over as soon as it is queued, but results seem to take their time."""

    def __init__(self) -> None:
        self.num_synchronized = 0

    def host_buffer(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def send(self, host: Tensor, device: Tensor) -> "HostMark":
        device.copy_(host)
        return HostMark()

    def fetch(self, tensors: Sequence[Tensor]) -> "HostFetched":
        return HostFetched([tensor.clone() for tensor in tensors])

    def mark(self) -> "HostMark":
        return HostMark()

    def synchronize(self) -> None:
        self.num_synchronized += 1


class HostMark:
    def __init__(self) -> None:
        self._now_ns = time.monotonic_ns()

    def wait(self) -> None:
        pass

    def ns_until(self, later: Self) -> int:
        return later._now_ns - self._now_ns


@dataclass
class HostFetched:
    """Is there when it has been asked for a few times: steps that wait are launched before."""

    tensors: list[Tensor]
    num_asked: int = 0

    def is_ready(self) -> bool:
        self.num_asked += 1
        return self.num_asked > _MOST_ASKED

    def arrays(self) -> list[NDArray[Any]]:
        return [tensor.numpy() for tensor in self.tensors]


class HostCapturer:
    """Runs what it captured again. Notes the number of each one's replays."""

    def __init__(self) -> None:
        self.num_replays: list[int] = []

    def capture(self, function: Callable[[], object]) -> Replay:
        function()
        index = len(self.num_replays)
        self.num_replays.append(0)

        def replay() -> None:
            self.num_replays[index] += 1
            function()

        return replay


def pipelined(engine: Engine, capturer: Capturer | None = None) -> PipelinedRunner:
    """A runner with steps behind one another, in place of the engine's."""
    assert isinstance(engine.runner, RoundsRunner)
    runner = engine.runner.runner
    assert isinstance(runner, Runner)
    return start_pipelined(
        runner._model,
        runner._pool,
        runner._attention,
        runner._tables,
        runner._implementation,
        HostStreams(),
        capturer,
    )
