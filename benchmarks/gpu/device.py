"""The device that is measured: its description, and the times of functions on it."""

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from statistics import median
from typing import Any, Protocol

import torch
import triton

# Calls of one function with different tensors, which together exceed the device's cache.
Calls = Sequence[Callable[[], object]]


class Device(Protocol):
    """Runs and times functions."""

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def cache_bytes(self) -> int:
        """Size of the last-level cache."""
        ...

    def median_seconds(self, functions: Mapping[str, Calls]) -> dict[str, float]:
        """Return the median time of one call of each function."""
        ...


class CudaDevice:
    """The current CUDA device."""

    _WARM_ROUNDS, _ROUNDS = 5, 30
    # Per graph, so that the gaps between graphs are negligible.
    _FEWEST_CALLS = 20
    # Delay of the device, in which the host launches everything that is timed.
    _HELD_CYCLES = 2_000_000

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cuda")

    @property
    def cache_bytes(self) -> int:
        return int(torch.cuda.get_device_properties(0).L2_cache_size)

    def median_seconds(self, functions: Mapping[str, Calls]) -> dict[str, float]:
        """Time CUDA graphs with CUDA events, which excludes the host's time to launch kernels;
        decode steps run as graphs, too. Each round runs all functions, so that a slow phase of the
        device affects all of them."""
        passes = {
            name: max(1, self._FEWEST_CALLS // len(calls)) for name, calls in functions.items()
        }
        graphs = {name: _recorded(calls, passes[name]) for name, calls in functions.items()}
        milliseconds: dict[str, list[float]] = {name: [] for name in functions}
        for number in range(self._WARM_ROUNDS + self._ROUNDS):
            for name, calls in functions.items():
                elapsed = self._milliseconds(graphs[name]) / (len(calls) * passes[name])
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


def _recorded(calls: Calls, passes: int) -> Any:
    """Record a CUDA graph that runs all calls `passes` times."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for function in calls:
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(passes):
            for function in calls:
                function()
    return graph


def device_description() -> dict[str, object]:
    """Return the device's properties for the results file."""
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
