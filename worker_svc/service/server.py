"""The worker's lifecycle: bind, load, serve, drain, stop."""

import asyncio
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import structlog
import uvloop

from quire.internal.v1 import worker_pb2, worker_pb2_grpc
from quire.service.channels import INTERNAL_MESSAGE_BYTES
from quire.service.health import Health
from quire.service.http2.limits import Limits
from quire.service.http2.server import Server
from quire.service.lifecycle import Signals, start_server
from quire.service.logs import configure_logging
from worker_svc.errors import WrongSettingError
from worker_svc.runner.device_thread import DeviceThread
from worker_svc.runner.step_runner import LoadedRunner
from worker_svc.service.recorder import Recorder, RecordingRunner
from worker_svc.service.servicer import WorkerServicer
from worker_svc.settings import WorkerSettings

log = structlog.get_logger()

# Called on the device thread; raises WrongSettingError for errors that no retry can fix.
RunnerLoader = Callable[[WorkerSettings], LoadedRunner]

_SERVICE = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name
_MODEL_CHECK = "model"
_WRONG_SETTING = 2
_DEVICE_LOST = 3
# The device thread gets the interpreter back from the event loop within this; the default is 5 ms.
SWITCH_INTERVAL_S = 0.0002
# Time for streams to end with their own status.
_CLOSE_GRACE_S = 1.0
# Time for the running step. Longer work, such as loading a model, is abandoned.
_LAST_STEP_S = 5.0


def main(settings: WorkerSettings, load_runner: RunnerLoader) -> int:
    """Run the worker until a signal stops it; return the process's exit status."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    configure_logging("worker", settings.log_level, settings.log_format)
    try:
        uvloop.run(run(settings, load_runner))
    except (WrongSettingError, OSError) as error:
        return report_wrong_setting(error)
    return 0


def report_wrong_setting(error: Exception) -> int:
    """Print the reason; return the process's exit status."""
    print(f"quire-worker: {error}", file=sys.stderr)
    return _WRONG_SETTING


async def run(settings: WorkerSettings, load_runner: RunnerLoader) -> None:
    """WrongSettingError and OSError if the settings cannot be served. After any other error of the
    model the worker stays up, not ready, and reports the reason instead of restarting forever."""
    signals = Signals()
    signals.install()
    health = Health([_MODEL_CHECK], [_SERVICE])
    thread = DeviceThread(settings.pipeline_parallel_size + 1)
    # The supervisor starts a new process with a new device context.
    servicer = WorkerServicer(thread, on_device_lost=partial(os._exit, _DEVICE_LOST))
    server = Server(Limits(INTERNAL_MESSAGE_BYTES))
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)
    recorder = None if settings.record is None else Recorder(settings.record)
    await start_server(
        server,
        settings.listen,
        [_SERVICE],
        health,
        settings.address_file,
        settings.server_certificates("h2"),
        settings.health_listen,
    )
    loading = thread.submit(partial(load_runner, settings))
    try:
        await _until_drained(settings, loading, signals, health, servicer, recorder)
    finally:
        await health.stopping()
        servicer.abort_stream()
        await server.stop(_CLOSE_GRACE_S)
        await health.close()
        ended = thread.stop(_LAST_STEP_S)
        if recorder is not None:
            recorder.close()
        if ended and loading.done() and not loading.cancelled() and not loading.exception():
            loading.result().close()
        log.info("stopped")
        if not ended:
            os._exit(0)


async def _until_drained(
    settings: WorkerSettings,
    loading: Future[LoadedRunner],
    signals: Signals,
    health: Health,
    servicer: WorkerServicer,
    recorder: Recorder | None,
) -> None:
    serving = asyncio.create_task(_load(settings.model, loading, health, servicer, recorder))
    draining = asyncio.create_task(signals.drain.wait())
    try:
        await asyncio.wait({serving, draining}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
            await draining
    finally:
        serving.cancel()
        draining.cancel()
    log.info("draining")
    await health.failed("draining", "the worker is draining")
    await signals.drain_within(servicer.drain, settings.drain_grace_s)


async def _load(
    model: str | None,
    loading: Future[LoadedRunner],
    health: Health,
    servicer: WorkerServicer,
    recorder: Recorder | None,
) -> None:
    try:
        loaded = await asyncio.wrap_future(loading)
    except WrongSettingError:
        raise
    except Exception as error:
        log.error("model not loaded", model=model, reason=str(error))
        await health.failed(_MODEL_CHECK, str(error))
        return
    if recorder is None:
        servicer.serve(loaded)
    else:
        servicer.serve(replace(loaded, runner=RecordingRunner(loaded.runner, recorder)))
        recorder.put(servicer.hello())
    await health.passed(_MODEL_CHECK)
    log.info("ready")
