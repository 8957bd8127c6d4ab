"""`python -m worker_svc`."""

import importlib
import sys

from worker_svc import server
from worker_svc.compatibility import refuse_foreign_kernels
from worker_svc.process import prepare_process
from worker_svc.settings import WorkerSettings


def main() -> None:
    settings = WorkerSettings.load()
    sys.exit(server.main(settings, _loader(settings.engine)))


def _loader(engine: str) -> server.EngineLoader:
    """Imports torch and transformers only for the engine that needs them."""
    if engine == "sim":
        module = "worker_svc.sim.engine"
    else:
        refuse_foreign_kernels()
        prepare_process()
        module = "worker_svc.torch_engine"
    load_engine: server.EngineLoader = importlib.import_module(module).load_engine
    return load_engine


if __name__ == "__main__":
    main()
