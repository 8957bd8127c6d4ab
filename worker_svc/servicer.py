"""WorkerService: who may drive this worker, and the streams by which they do."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable

import grpc
import structlog

from quire.internal.v1 import worker_pb2, worker_pb2_grpc
from quire.service.errors import RequestError, abort, failed, unavailable
from quire.service.protocol import PROTOCOL_VERSION
from worker_svc.device_thread import DeviceThread
from worker_svc.engine import Engine
from worker_svc.explain import Explanation
from worker_svc.lane import Lane
from worker_svc.plans import PlanError, plan_from_proto

log = structlog.get_logger()

_HEARTBEAT_S = 1.0
_Requests = AsyncIterator[worker_pb2.ExecuteRequest]
_Context = grpc.aio.ServicerContext[worker_pb2.ExecuteRequest, worker_pb2.ExecuteResponse]


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """One lane at a time, that of the newest stream with the highest epoch."""

    def __init__(
        self, thread: DeviceThread, on_device_lost: Callable[[], object] = lambda: None
    ) -> None:
        """`on_device_lost` is called when a device does not recover from a step: no other step
        will run on it in this process."""
        self._thread = thread
        self._on_device_lost = on_device_lost
        self._incarnation = secrets.randbits(64)
        self._engine: Engine | None = None
        self._draining = False
        # The highest fencing number seen, and its holder.
        self._epoch = 0
        self._holder = b""
        self._opening = asyncio.Lock()
        # The newest one, also when its stream is over: its last step may still run.
        self._lane: Lane | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    def serve(self, engine: Engine) -> None:
        """From here on lanes can be opened."""
        self._engine = engine

    async def drain(self) -> None:
        """Tells the scheduler at once; returns when it has closed its lane."""
        self._draining = True
        if self._lane is not None:
            self._lane.send(self._heartbeat())
        while True:
            await self._idle.wait()
            # A stream may be waiting for the last step of the one before it.
            async with self._opening:
                if self._idle.is_set():
                    return

    def leave(self) -> None:
        """Ends the open stream, if any: the worker is about to go."""
        if self._lane is not None:
            self._lane.end(unavailable("WORKER_LEAVING", "the worker is going away"))

    async def Identify(  # noqa: N802
        self,
        request: worker_pb2.IdentifyRequest,
        context: grpc.aio.ServicerContext[worker_pb2.IdentifyRequest, worker_pb2.IdentifyResponse],
    ) -> worker_pb2.IdentifyResponse:
        try:
            self._require_engine()
        except RequestError as error:
            await abort(context, error)
        return worker_pb2.IdentifyResponse(incarnation=self._incarnation)

    async def Execute(  # type: ignore[override]  # noqa: N802
        self, request_iterator: _Requests, context: _Context
    ) -> None:
        """Writes to the context: a cancelled call then unwinds here, at once."""
        lane = None
        first = await anext(request_iterator, None)
        try:
            opening = _opening(first)
            self._check(opening)
            lane = await self._open_lane(opening)
            await self._serve_lane(lane, request_iterator, context)
        except RequestError as error:
            # A scheduler that asks who is here gives up its stream without a word.
            if first is not None:
                log.warning("stream ended", reason=error.message)
            # Before the lane is closed: the scheduler need not wait for the step on the device.
            await abort(context, error)
        finally:
            if lane is not None:
                await self._close_lane(lane)

    async def Explain(  # noqa: N802
        self,
        request_iterator: AsyncIterator[worker_pb2.ExplainRequest],
        context: grpc.aio.ServicerContext[worker_pb2.ExplainRequest, worker_pb2.ExplainResponse],
    ) -> worker_pb2.ExplainResponse:
        explanation = Explanation()
        try:
            async for request in request_iterator:
                explanation.add(request.entry)
            return worker_pb2.ExplainResponse(step=explanation.step())
        except ValueError as error:
            status = grpc.StatusCode.INVALID_ARGUMENT
            return await abort(context, failed(status, "WRONG_RECORDING", str(error)))

    async def _serve_lane(self, lane: Lane, requests: _Requests, context: _Context) -> None:
        await context.write(worker_pb2.ExecuteResponse(hello=self.hello()))
        tasks = [
            asyncio.create_task(_read_plans(requests, lane)),
            asyncio.create_task(self._beat(lane)),
        ]
        try:
            async for response in lane.responses():
                await context.write(response)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _check(self, opening: worker_pb2.OpenLane) -> None:
        """RequestError for a scheduler that must not drive this worker, or not yet."""
        self._require_engine()
        _check_version(opening.protocol_version)
        self._raise_fence(opening.epoch, opening.holder)

    async def _open_lane(self, opening: worker_pb2.OpenLane) -> Lane:
        """Takes the worker from a former stream, and waits for its last step."""
        engine = self._require_engine()
        async with self._opening:
            if self._lane is not None:
                message = "a newer stream has taken this worker"
                self._lane.end(failed(grpc.StatusCode.ABORTED, "LANE_TAKEN", message))
                await self._clear(self._lane)
            # A newer leader may have come while this one waited.
            self._raise_fence(opening.epoch, opening.holder)
            self._lane = Lane(opening.epoch, self._thread, engine.runner)
            self._idle.clear()
            log.info("lane opened", epoch=opening.epoch, holder=opening.holder.hex())
            return self._lane

    async def _close_lane(self, lane: Lane) -> None:
        if self._lane is lane:
            self._idle.set()
            log.info("lane closed")
        await self._clear(lane)

    async def _clear(self, lane: Lane) -> None:
        try:
            await lane.close()
        except Exception as error:
            log.critical("device lost", reason=str(error))
            self._on_device_lost()
            raise

    def _require_engine(self) -> Engine:
        if self._engine is None:
            raise unavailable("MODEL_NOT_LOADED", "the worker's model is not loaded")
        return self._engine

    def _raise_fence(self, epoch: int, holder: bytes) -> None:
        """FAILED_PRECONDITION for an epoch lower than the fence, or the same of another holder."""
        if epoch < self._epoch:
            message = f"epoch {epoch} is over: this worker has seen {self._epoch}"
            raise failed(grpc.StatusCode.FAILED_PRECONDITION, "STALE_EPOCH", message)
        if epoch == self._epoch and holder != self._holder:
            message = f"epoch {epoch} belongs to {self._holder.hex()}, not to {holder.hex()}"
            raise failed(grpc.StatusCode.FAILED_PRECONDITION, "FOREIGN_EPOCH", message)
        self._epoch, self._holder = epoch, holder

    async def _beat(self, lane: Lane) -> None:
        """Goes on while a step runs: a long step is no dead worker."""
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            lane.send(self._heartbeat())

    def _heartbeat(self) -> worker_pb2.ExecuteResponse:
        beat = worker_pb2.Heartbeat(
            last_finished_step=self._require_engine().runner.last_finished_step,
            draining=self._draining,
        )
        return worker_pb2.ExecuteResponse(heartbeat=beat)

    def hello(self) -> worker_pb2.Hello:
        """What the worker is. RequestError while nothing is served."""
        engine = self._require_engine()
        identity = engine.identity
        return worker_pb2.Hello(
            incarnation=self._incarnation,
            protocol_version=PROTOCOL_VERSION,
            model_fingerprint=identity.model_fingerprint,
            block_size=identity.block_size,
            num_blocks=identity.num_blocks,
            num_host_blocks=identity.num_host_blocks,
            kv_cache_dtype=identity.kv_cache_dtype,
            max_num_seqs=identity.max_num_seqs,
            max_model_len=identity.max_model_len,
            max_num_batched_tokens=identity.max_num_batched_tokens,
            last_finished_step=engine.runner.last_finished_step,
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
            f"the scheduler speaks protocol version {protocol_version}, "
            f"this worker speaks {PROTOCOL_VERSION}"
        )
        raise failed(grpc.StatusCode.FAILED_PRECONDITION, "PROTOCOL_VERSION", message)


async def _read_plans(requests: _Requests, lane: Lane) -> None:
    """Queues plans until the scheduler sends no more or sends a wrong one."""
    try:
        async for request in requests:
            if request.WhichOneof("message") != "plan":
                raise PlanError("only plans may follow `open`")
            lane.submit(plan_from_proto(request.plan))
        lane.complete()
    except RequestError as error:
        lane.end(error)
    except PlanError as error:
        lane.end(failed(grpc.StatusCode.INVALID_ARGUMENT, "WRONG_PLAN", str(error)))
