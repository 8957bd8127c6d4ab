"""Times of functions that take turns."""

import time
from collections.abc import Callable, Mapping

Function = Callable[[], object]


def best_seconds(functions: Mapping[str, Function], rounds: int) -> dict[str, float]:
    """The shortest time of each, in seconds.

    In every round each function runs once, so that a slow moment of the machine is not one of them
    alone; the first round does not count.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(1 + rounds):
        for name, function in functions.items():
            started_s = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - started_s)
    return {name: min(times[1:]) for name, times in seconds.items()}
