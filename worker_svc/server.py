"""The worker's life: bind, load, serve, drain, stop."""

import asyncio
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import grpc
import structlog

from quire.internal.v1 import worker_pb2, worker_pb2_grpc
from quire.service.channels import INTERNAL_MESSAGE_BYTES, server_options
from quire.service.health import Health
from quire.service.lifecycle import Signals, start_server
from quire.service.logs import configure_logging
from worker_svc.device_thread import DeviceThread
from worker_svc.engine import Engine
from worker_svc.recorder import Recorder, RecordingRunner
from worker_svc.servicer import WorkerServicer
from worker_svc.settings import WorkerSettings, WrongSettingError

log = structlog.get_logger()

# Called on the device thread; raises WrongSettingError for what no retry can mend.
EngineLoader = Callable[[WorkerSettings], Engine]

_SERVICE = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name
_MODEL_CHECK = "model"
_WRONG_SETTING = 2
_DEVICE_LOST = 3
# The device thread gets the interpreter back from the loop within this, not within 5 ms.
_SWITCH_INTERVAL_S = 0.0002
# For streams to end with a status of their own.
_LEAVING_S = 1.0
# For the step on the device. What takes longer, such as a model being loaded, is left behind.
_LAST_STEP_S = 5.0


def main(settings: WorkerSettings, load_engine: EngineLoader) -> int:
    """Runs the worker until it is told to stop; returns the process's status."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    configure_logging("worker", settings.log_level, settings.log_format)
    try:
        asyncio.run(run(settings, load_engine))
    except (WrongSettingError, OSError) as error:
        print(f"quire-worker: {error}", file=sys.stderr)
        return _WRONG_SETTING
    return 0


async def run(settings: WorkerSettings, load_engine: EngineLoader) -> None:
    """WrongSettingError and OSError if the settings cannot be served; other faults of the model
    leave the worker up and not ready, so that it says why instead of starting over and over."""
    signals = Signals()
    signals.install()
    health = Health([_MODEL_CHECK], [_SERVICE])
    thread = DeviceThread()
    # Whoever starts workers starts another one, which has a device that works.
    servicer = WorkerServicer(thread, on_device_lost=partial(os._exit, _DEVICE_LOST))
    server = grpc.aio.server(options=server_options(INTERNAL_MESSAGE_BYTES))
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)
    recorder = None if settings.record is None else Recorder(settings.record)
    await start_server(server, settings.listen, [_SERVICE], health, settings.address_file)
    loaded = thread.submit(partial(load_engine, settings))
    try:
        await _until_drained(settings, loaded, signals, health, servicer, recorder)
    finally:
        await health.stopping()
        servicer.leave()
        await server.stop(_LEAVING_S)
        ended = thread.stop(_LAST_STEP_S)
        if recorder is not None:
            recorder.close()
        log.info("stopped")
        if not ended:
            os._exit(0)


async def _until_drained(
    settings: WorkerSettings,
    loaded: Future[Engine],
    signals: Signals,
    health: Health,
    servicer: WorkerServicer,
    recorder: Recorder | None,
) -> None:
    loading = asyncio.create_task(_load(settings.model, loaded, health, servicer, recorder))
    draining = asyncio.create_task(signals.drain.wait())
    try:
        await asyncio.wait({loading, draining}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            loading.result()
            await draining
    finally:
        loading.cancel()
        draining.cancel()
    log.info("draining")
    await health.failed("draining", "the worker is leaving")
    await signals.drain_within(servicer.drain, settings.drain_grace_s)


async def _load(
    model: str | None,
    loaded: Future[Engine],
    health: Health,
    servicer: WorkerServicer,
    recorder: Recorder | None,
) -> None:
    try:
        engine = await asyncio.wrap_future(loaded)
    except WrongSettingError:
        raise
    except Exception as error:
        log.error("model not loaded", model=model, reason=str(error))
        await health.failed(_MODEL_CHECK, str(error))
        return
    if recorder is None:
        servicer.serve(engine)
    else:
        servicer.serve(replace(engine, runner=RecordingRunner(engine.runner, recorder)))
        recorder.put(servicer.hello())
    await health.passed(_MODEL_CHECK)
    log.info("ready")
