"""`python -m worker_svc`."""

import importlib
import os
import sys
from functools import partial
from typing import NoReturn

from quire.service.lifecycle import end_at_interrupts
from worker_svc.errors import WrongSettingError
from worker_svc.runner.step_runner import LoadedRunner
from worker_svc.service import server
from worker_svc.service.process import (
    pause_collections,
    prepare_process,
    refuse_foreign_kernels,
    resume_collections,
)
from worker_svc.settings import WorkerSettings


def main() -> None:
    end_at_interrupts()
    settings = WorkerSettings.load()
    pause_collections()
    if settings.num_ranks > 1 and os.environ.get("RANK", "0") != "0":
        _end(_follow(settings))
    status = server.main(settings, _loader(settings.engine))
    if settings.num_ranks > 1:
        _end(status)
    sys.exit(status)


def _follow(settings: WorkerSettings) -> int:
    """Run a rank that torchrun has started, other than rank 0."""
    refuse_foreign_kernels()
    prepare_process()
    # Where rank 0 ends first, torch would print a stack trace below the reason.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    following = importlib.import_module("worker_svc.ranks.following")
    try:
        status: int = following.follow(settings, is_child=False)
    except WrongSettingError as error:
        return server.report_wrong_setting(error)
    return status


def _end(status: int) -> NoReturn:
    """End without the interpreter's end, which takes a second, and in which threads of NCCL and
    graphs that contain its kernels would wait for each other."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _loader(engine: str) -> server.RunnerLoader:
    """Import torch and transformers only for the engine that needs them."""
    if engine == "sim":
        module = "worker_svc.sim.runner_loading"
    else:
        refuse_foreign_kernels()
        prepare_process()
        module = "worker_svc.loading.runner_loading"
    return partial(_load_runner, importlib.import_module(module).load_runner)


def _load_runner(load_runner: server.RunnerLoader, settings: WorkerSettings) -> LoadedRunner:
    try:
        return load_runner(settings)
    finally:
        resume_collections()


if __name__ == "__main__":
    main()
