"""`python -m benchmarks.kernels`."""

import importlib
import sys

from worker_svc.service.process import prepare_process

if __name__ == "__main__":
    # Before torch is imported.
    prepare_process()
    sys.exit(importlib.import_module("benchmarks.kernels.report").main())
