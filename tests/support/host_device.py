"""The host in place of a GPU: its streams and its graphs."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from numpy.typing import NDArray
from torch import Tensor

from worker_svc.gpu.graphs import Capturer, Replay
from worker_svc.gpu.pipelined_runner import PipelinedRunner
from worker_svc.loading.startup import start_pipelined
from worker_svc.logits.built_in import ProcessorFactory
from worker_svc.runner.multi_step import MultiStepRunner
from worker_svc.runner.runner import Runner
from worker_svc.runner.step_runner import LoadedRunner

_MAX_POLLS = 3


class HostStreams:
    """Runs everything at once, but reports results as ready only after some polls."""

    def __init__(self) -> None:
        self.num_synchronized = 0

    def host_buffer(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def send(self, host: Tensor, device: Tensor) -> "HostEvent":
        device.copy_(host)
        return HostEvent()

    def upload(self, array: NDArray[Any], device: torch.device) -> Tensor:
        return torch.from_numpy(array.copy()).to(device)

    def fetch(self, tensors: Sequence[Tensor]) -> "HostCopies":
        return HostCopies([tensor.clone() for tensor in tensors])

    def record_event(self) -> "HostEvent":
        return HostEvent()

    def synchronize(self) -> None:
        self.num_synchronized += 1


class HostEvent:
    def __init__(self) -> None:
        self._now_ns = time.monotonic_ns()

    def wait(self) -> None:
        pass

    def elapsed_ns(self, end: Self) -> int:
        return end._now_ns - self._now_ns


@dataclass
class HostCopies:
    """Ready after a few polls, so waiting steps are launched before."""

    tensors: list[Tensor]
    num_polls: int = 0

    def is_ready(self) -> bool:
        self.num_polls += 1
        return self.num_polls > _MAX_POLLS

    def arrays(self) -> list[NDArray[Any]]:
        return [tensor.numpy() for tensor in self.tensors]


class HostCapturer:
    """Replays by calling the captured function again. Counts the replays of each."""

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


def pipelined(
    loaded: LoadedRunner,
    capturer: Capturer | None = None,
    own: Mapping[str, ProcessorFactory] | None = None,
) -> PipelinedRunner:
    """A pipelined runner in place of the loaded one."""
    assert isinstance(loaded.runner, MultiStepRunner)
    runner = loaded.runner.runner
    assert isinstance(runner, Runner)
    return start_pipelined(
        runner._model,
        runner._pool,
        runner._attention,
        runner._tables,
        runner._implementation,
        HostStreams(),
        capturer,
        own_processors=own,
    )
