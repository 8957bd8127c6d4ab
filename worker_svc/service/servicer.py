"""WorkerService: the streams by which schedulers drive this worker, fenced by epoch."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable

import grpc
import structlog

from quire.internal.v1 import worker_pb2, worker_pb2_grpc
from quire.service.errors import RequestError, abort, failed, unavailable
from quire.service.protocol_version import PROTOCOL_VERSION
from worker_svc.plan.plans import PlanError, plan_from_proto
from worker_svc.runner.device_thread import DeviceThread
from worker_svc.runner.step_runner import LoadedRunner
from worker_svc.service.execute_stream import ExecuteStream
from worker_svc.service.step_inspector import StepInspector

log = structlog.get_logger()

_HEARTBEAT_S = 1.0
# Less than schedulers wait for a response.
_LOAD_WAIT_S = 3.0
_Requests = AsyncIterator[worker_pb2.ExecuteRequest]
_Context = grpc.aio.ServicerContext[worker_pb2.ExecuteRequest, worker_pb2.ExecuteResponse]


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Serves one Execute stream at a time: the newest one with the highest epoch of its shard.

    Another shard gets the worker when no stream is open. It has epochs of its own, and gets a new
    incarnation: the pool that the shard before it may keep has been overwritten when that shard
    gets the worker back.
    """

    def __init__(
        self, thread: DeviceThread, on_device_lost: Callable[[], object] = lambda: None
    ) -> None:
        """`on_device_lost` is called when the device does not recover from a step: no later step
        can run in this process."""
        self._thread = thread
        self._on_device_lost = on_device_lost
        self._incarnation = secrets.randbits(64)
        self._loaded: LoadedRunner | None = None
        # Set when the model is loaded or the worker stops.
        self._load_ended = asyncio.Event()
        self._draining = False
        # The shard of the newest stream; None before the first one.
        self._shard: int | None = None
        # By shard, the highest epoch so far, and its holder.
        self._fences: dict[int, tuple[int, bytes]] = {}
        # By shard, why its last stream was refused, since a lane was opened.
        self._refusals: dict[int, str] = {}
        self._open_lock = asyncio.Lock()
        # The newest one, even after its stream: its last step may still run.
        self._stream: ExecuteStream | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    def serve(self, loaded: LoadedRunner) -> None:
        """Allow streams to be opened."""
        self._loaded = loaded
        self._load_ended.set()

    async def drain(self) -> None:
        """Notify the scheduler at once; return when it has closed its stream."""
        self._draining = True
        if self._stream is not None:
            self._stream.send(self._heartbeat())
        while True:
            await self._idle.wait()
            # A new stream may be waiting for the last step of the previous one.
            async with self._open_lock:
                if self._idle.is_set():
                    return

    def abort_stream(self) -> None:
        """End the open stream and the waits for the model, if any, because the worker stops."""
        self._load_ended.set()
        if self._stream is not None:
            self._stream.end(unavailable("WORKER_DRAINING", "the worker is going away"))

    async def Identify(  # noqa: N802
        self,
        request: worker_pb2.IdentifyRequest,
        context: grpc.aio.ServicerContext[worker_pb2.IdentifyRequest, worker_pb2.IdentifyResponse],
    ) -> worker_pb2.IdentifyResponse:
        # A scheduler that asked again now and then would learn of the model later.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOAD_WAIT_S):
                await self._load_ended.wait()
        try:
            self._require_loaded()
        except RequestError as error:
            await abort(context, error)
        return worker_pb2.IdentifyResponse(incarnation=self._incarnation)

    async def Execute(  # type: ignore[override]  # noqa: N802
        self, request_iterator: _Requests, context: _Context
    ) -> None:
        """Write to the context, so a cancelled call unwinds here at once."""
        stream = None
        first = await anext(request_iterator, None)
        try:
            opening = _opening(first)
            self._check(opening)
            stream = await self._open_stream(opening)
            await self._serve(stream, request_iterator, context)
        except RequestError as error:
            # A stream without a message is a probe.
            if first is not None:
                self._log_end(first.open.shard, stream is not None, error.message)
            # Before the stream is closed, so the scheduler does not wait for the running step.
            await abort(context, error)
        finally:
            if stream is not None:
                await self._close_stream(stream)

    async def Explain(  # noqa: N802
        self,
        request_iterator: AsyncIterator[worker_pb2.ExplainRequest],
        context: grpc.aio.ServicerContext[worker_pb2.ExplainRequest, worker_pb2.ExplainResponse],
    ) -> worker_pb2.ExplainResponse:
        inspector = StepInspector()
        try:
            async for request in request_iterator:
                inspector.add(request.entry)
            return worker_pb2.ExplainResponse(step=inspector.step())
        except ValueError as error:
            status = grpc.StatusCode.INVALID_ARGUMENT
            return await abort(context, failed(status, "WRONG_RECORDING", str(error)))

    async def _serve(self, stream: ExecuteStream, requests: _Requests, context: _Context) -> None:
        await context.write(worker_pb2.ExecuteResponse(hello=self.hello()))
        tasks = [
            asyncio.create_task(_read_plans(requests, stream)),
            asyncio.create_task(self._send_heartbeats(stream)),
        ]
        try:
            async for response in stream.responses():
                await context.write(response)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _check(self, opening: worker_pb2.OpenLane) -> None:
        """RequestError if the scheduler must not drive this worker, or not yet."""
        self._require_loaded()
        _check_version(opening.protocol_version)
        self._advance_epoch(opening)

    async def _open_stream(self, opening: worker_pb2.OpenLane) -> ExecuteStream:
        """Take the worker over from an earlier stream, after that stream's last step."""
        loaded = self._require_loaded()
        async with self._open_lock:
            # Another shard, which waited for the lock as well, may have been first.
            self._advance_epoch(opening)
            if self._stream is not None:
                message = "a newer stream has taken this worker"
                self._stream.end(failed(grpc.StatusCode.ABORTED, "LANE_TAKEN", message))
                await self._clear(self._stream)
            # A newer leader may have opened a stream while this one waited.
            self._advance_epoch(opening)
            self._enter_shard(opening.shard)
            self._stream = ExecuteStream(opening.epoch, self._thread, loaded)
            self._refusals.clear()
            self._idle.clear()
            log.info(
                "lane opened",
                shard=opening.shard,
                epoch=opening.epoch,
                holder=opening.holder.hex(),
            )
            return self._stream

    async def _close_stream(self, stream: ExecuteStream) -> None:
        if self._stream is stream:
            self._idle.set()
            log.info("lane closed")
        await self._clear(stream)

    async def _clear(self, stream: ExecuteStream) -> None:
        try:
            await stream.close()
        except Exception as error:
            log.critical("device lost", reason=str(error))
            self._on_device_lost()
            raise

    def _require_loaded(self) -> LoadedRunner:
        if self._loaded is None:
            raise unavailable("MODEL_NOT_LOADED", "the worker's model is not loaded")
        return self._loaded

    def _advance_epoch(self, opening: worker_pb2.OpenLane) -> None:
        """FAILED_PRECONDITION for a lower epoch of the shard, or the same epoch of another holder.
        UNAVAILABLE while a stream of another shard is open."""
        if opening.shard != self._shard and not self._idle.is_set():
            raise unavailable("OTHER_SHARD", f"shard {self._shard} has this worker")
        epoch, holder = opening.epoch, opening.holder
        highest, highest_holder = self._fences.get(opening.shard, (0, holder))
        if epoch < highest:
            message = f"epoch {epoch} is stale: this worker is at epoch {highest}"
            raise failed(grpc.StatusCode.FAILED_PRECONDITION, "STALE_EPOCH", message)
        if epoch == highest and holder != highest_holder:
            message = f"epoch {epoch} belongs to {highest_holder.hex()}, not to {holder.hex()}"
            raise failed(grpc.StatusCode.FAILED_PRECONDITION, "FOREIGN_EPOCH", message)
        self._fences[opening.shard] = epoch, holder

    def _log_end(self, shard: int, was_open: bool, reason: str) -> None:
        """A scheduler repeats a refused stream twice a second: it is logged when the reason
        changes."""
        if was_open or self._refusals.get(shard) != reason:
            log.warning("stream ended", shard=shard, reason=reason)
        if not was_open:
            self._refusals[shard] = reason

    def _enter_shard(self, shard: int) -> None:
        if self._shard not in (None, shard):
            self._incarnation = secrets.randbits(64)
        self._shard = shard

    async def _send_heartbeats(self, stream: ExecuteStream) -> None:
        """Continue during a step, so a worker with a long step is not taken for dead. Where steps
        are short, their results are enough."""
        while True:
            await asyncio.sleep(max(0.0, _HEARTBEAT_S - stream.silent_s))
            if stream.silent_s >= _HEARTBEAT_S:
                stream.send(self._heartbeat())
                await asyncio.sleep(_HEARTBEAT_S)

    def _heartbeat(self) -> worker_pb2.ExecuteResponse:
        heartbeat = worker_pb2.Heartbeat(
            last_finished_step=self._require_loaded().runner.last_finished_step,
            draining=self._draining,
        )
        return worker_pb2.ExecuteResponse(heartbeat=heartbeat)

    def hello(self) -> worker_pb2.Hello:
        """The worker's properties and state. RequestError before `serve`."""
        loaded = self._require_loaded()
        return worker_pb2.Hello(
            **vars(loaded.identity),
            incarnation=self._incarnation,
            protocol_version=PROTOCOL_VERSION,
            last_finished_step=loaded.runner.last_finished_step,
            draining=self._draining,
        )


def _opening(request: worker_pb2.ExecuteRequest | None) -> worker_pb2.OpenLane:
    if request is None or request.WhichOneof("message") != "open":
        message = "the first message must be `open`"
        raise failed(grpc.StatusCode.INVALID_ARGUMENT, "OPEN_MISSING", message)
    return request.open


def _check_version(protocol_version: int) -> None:
    if protocol_version != PROTOCOL_VERSION:
        message = (
            f"the scheduler has protocol version {protocol_version}, "
            f"this worker has {PROTOCOL_VERSION}"
        )
        raise failed(grpc.StatusCode.FAILED_PRECONDITION, "PROTOCOL_VERSION", message)


async def _read_plans(requests: _Requests, stream: ExecuteStream) -> None:
    """Queue plans until the scheduler closes the stream or sends an invalid one."""
    try:
        async for request in requests:
            if request.WhichOneof("message") != "plan":
                raise PlanError("only plans may follow `open`")
            stream.submit(plan_from_proto(request.plan))
        stream.complete()
    except RequestError as error:
        stream.end(error)
    except PlanError as error:
        stream.end(failed(grpc.StatusCode.INVALID_ARGUMENT, "WRONG_PLAN", str(error)))
