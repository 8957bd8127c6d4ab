"""Measures the bandwidth at which the machine reads memory, with a thread per core.

It is an average over a fraction of a second, as a stream's rate is an average: other virtual
machines take a part of a host's bandwidth at times.
"""

import importlib
import time

from benchmarks.engines.child import serve
from worker_svc.service.process import prepare_process

_ROUNDS = 20
# As much as the weights have. A virtual machine may report a smaller cache than it profits from.
_WORKING_SET = 2**29


def main() -> None:
    # Memory is kept as the worker keeps it; before torch is imported.
    prepare_process()
    limits = importlib.import_module("benchmarks.kernels.limits").Limits(_WORKING_SET)

    def gigabytes_per_s() -> float:
        limits.read()
        started_s = time.perf_counter()
        for _ in range(_ROUNDS):
            limits.read()
        return float(limits.gigabytes_per_s((time.perf_counter() - started_s) / _ROUNDS))

    serve({"read": gigabytes_per_s})


if __name__ == "__main__":
    main()
