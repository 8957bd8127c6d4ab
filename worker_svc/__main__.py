"""`python -m worker_svc`."""

import importlib
import sys

from worker_svc.compatibility import refuse_foreign_kernels
from worker_svc.settings import WorkerSettings


def main() -> None:
    settings = WorkerSettings.load()
    refuse_foreign_kernels()
    # Only now, because it imports transformers.
    server = importlib.import_module("worker_svc.server")
    sys.exit(server.main(settings))


if __name__ == "__main__":
    main()
