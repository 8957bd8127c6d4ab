"""Times of functions, measured alternately."""

import time
from collections.abc import Callable, Mapping

Function = Callable[[], object]


def best_seconds(functions: Mapping[str, Function], rounds: int) -> dict[str, float]:
    """Return the shortest time of each function, in seconds.

    Each round runs every function once, so that a slow phase of the machine affects all of them;
    the first round does not count.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(1 + rounds):
        for name, function in functions.items():
            started_s = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - started_s)
    return {name: min(times[1:]) for name, times in seconds.items()}
