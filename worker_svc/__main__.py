"""`python -m worker_svc`."""

import importlib
import sys

from worker_svc.service import server
from worker_svc.service.process import prepare_process, refuse_foreign_kernels
from worker_svc.settings import WorkerSettings


def main() -> None:
    settings = WorkerSettings.load()
    sys.exit(server.main(settings, _loader(settings.engine)))


def _loader(engine: str) -> server.RunnerLoader:
    """Import torch and transformers only for the engine that needs them."""
    if engine == "sim":
        module = "worker_svc.sim.runner_loading"
    else:
        refuse_foreign_kernels()
        prepare_process()
        module = "worker_svc.runner.runner_loading"
    load_runner: server.RunnerLoader = importlib.import_module(module).load_runner
    return load_runner


if __name__ == "__main__":
    main()
