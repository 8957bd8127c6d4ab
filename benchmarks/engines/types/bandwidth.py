"""Measures the bandwidth at which the machine reads memory, with a thread per core."""

import importlib

from benchmarks.engines.child import serve
from worker_svc.service.process import prepare_process

_ROUNDS = 20
# As much as the weights have. A virtual machine may report a smaller cache than it profits from.
_WORKING_SET = 2**29


def main() -> None:
    # Memory is kept as the worker keeps it; before torch is imported.
    prepare_process()
    limits = importlib.import_module("benchmarks.kernels.limits").Limits(_WORKING_SET)
    timing = importlib.import_module("benchmarks.kernels.timing")

    def gigabytes_per_s() -> float:
        seconds = timing.best_seconds({"read": limits.read}, _ROUNDS)["read"]
        return float(limits.gigabytes_per_s(seconds))

    serve({"read": gigabytes_per_s})


if __name__ == "__main__":
    main()
