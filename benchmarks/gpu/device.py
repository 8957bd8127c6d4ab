"""A device to be measured: how long functions take on it, and what it is."""

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from statistics import median
from typing import Any, Protocol

import torch
import triton

# Each of them with other tensors, which together do not fit into the device's cache.
Turns = Sequence[Callable[[], object]]


class Device(Protocol):
    """What runs the kernels."""

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def cache_bytes(self) -> int:
        """Of its last level."""
        ...

    def median_seconds(self, functions: Mapping[str, Turns]) -> dict[str, float]:
        """Of one call of each."""
        ...


class CudaDevice:
    """The current CUDA device."""

    _WARM_ROUNDS, _ROUNDS = 5, 30
    # Of a recording: what lies between two of them is little beside them.
    _FEWEST_CALLS = 20
    # In which the host hands over all that is timed.
    _HELD_CYCLES = 2_000_000

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cuda")

    @property
    def cache_bytes(self) -> int:
        return int(torch.cuda.get_device_properties(0).L2_cache_size)

    def median_seconds(self, functions: Mapping[str, Turns]) -> dict[str, float]:
        """By events of the device, of recordings, as steps of decoding rows are: what a host takes
        to launch a kernel is none of its time. In every round each function has one pass, so that
        a slow moment is not one of them alone."""
        passes = {
            name: max(1, self._FEWEST_CALLS // len(turns)) for name, turns in functions.items()
        }
        graphs = {name: _recorded(turns, passes[name]) for name, turns in functions.items()}
        milliseconds: dict[str, list[float]] = {name: [] for name in functions}
        for number in range(self._WARM_ROUNDS + self._ROUNDS):
            for name, turns in functions.items():
                elapsed = self._milliseconds(graphs[name]) / (len(turns) * passes[name])
                if number >= self._WARM_ROUNDS:
                    milliseconds[name].append(elapsed)
        return {name: median(times) / 1000 for name, times in milliseconds.items()}

    def _milliseconds(self, graph: Any) -> float:
        events: list[Any] = [
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        ]
        torch.cuda._sleep(self._HELD_CYCLES)  # type: ignore[no-untyped-call]
        events[0].record()
        graph.replay()
        events[1].record()
        events[1].synchronize()
        return float(events[0].elapsed_time(events[1]))


def _recorded(turns: Turns, passes: int) -> Any:
    """A graph of all of them, some times."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for function in turns:
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(passes):
            for function in turns:
                function()
    return graph


def device_description() -> dict[str, object]:
    """For a result's file."""
    properties: Any = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "device_gib": round(properties.total_memory / 2**30, 1),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
    }
