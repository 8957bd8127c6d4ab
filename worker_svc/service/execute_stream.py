"""The worker's end of an Execute stream: plans in, results out, in the same order."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import grpc
import structlog

from quire.internal.v1 import worker_pb2
from quire.service.errors import RequestError, failed
from worker_svc.plan.plans import Plan, StepOutput, result_to_proto
from worker_svc.runner.device_thread import DeviceThread
from worker_svc.runner.step_runner import Failed, LoadedRunner, PendingOutput, ReadyOutput

log = structlog.get_logger()


class ExecuteStream:
    """Queues plans for the device thread and responses for the scheduler.

    Runs on the event loop; only `_launch`, `_finish` and `_report` are called on the device thread.
    That thread launches, completes and reports steps in the order of their plans.
    """

    def __init__(self, epoch: int, thread: DeviceThread, loaded: LoadedRunner) -> None:
        self._epoch = epoch
        self._thread = thread
        self._runner = loaded.runner
        self._on_arrival = loaded.on_arrival
        self._loop = asyncio.get_running_loop()
        self._sent_at = self._loop.time()
        self._last_step = 0
        self._has_work = False  # a plan with scheduled rows was received
        self._pending: set[Future[StepOutput | None]] = set()
        self._responses: asyncio.Queue[worker_pb2.ExecuteResponse | RequestError | None] = (
            asyncio.Queue()
        )
        self._ended = False  # no plan runs and nothing is sent any more
        self._broken = False  # a step failed; set on the device thread
        self._complete = False  # the scheduler sends no more plans
        self._cleared: Future[None] | None = None

    def submit(self, plan: Plan) -> None:
        """Queue a plan. RequestError for one of another epoch or out of order."""
        if plan.epoch != self._epoch:
            message = f"a plan of epoch {plan.epoch} on a stream of epoch {self._epoch}"
            raise failed(grpc.StatusCode.FAILED_PRECONDITION, "WRONG_EPOCH", message)
        if plan.step <= self._last_step:
            message = f"step {plan.step} after step {self._last_step}"
            raise failed(grpc.StatusCode.FAILED_PRECONDITION, "STEP_OUT_OF_ORDER", message)
        if self._ended:
            return
        self._last_step = plan.step
        self._on_arrival(plan)
        if not self._has_work and len(plan.rows):
            self._has_work = True
            log.info("first work", step=plan.step)
        report = partial(self._report, plan)
        self._pending.add(self._thread.launch(partial(self._launch, plan), report))

    def send(self, response: worker_pb2.ExecuteResponse) -> None:
        self._responses.put_nowait(response)

    async def responses(self) -> AsyncIterator[worker_pb2.ExecuteResponse]:
        """End after the last result if the stream is complete. RequestError if it failed."""
        while (response := await self._responses.get()) is not None:
            if isinstance(response, RequestError):
                raise response
            self._sent_at = self._loop.time()
            yield response

    @property
    def silent_s(self) -> float:
        """Seconds since the last response was sent."""
        return self._loop.time() - self._sent_at

    def complete(self) -> None:
        """End the stream after the last result; no plan follows."""
        self._complete = True
        self._end_if_complete()

    def end(self, error: RequestError) -> None:
        """End the stream with `error`, after the responses queued so far."""
        if not self._ended:
            self._ended = True
            self._responses.put_nowait(error)

    async def close(self) -> None:
        """Discard queued plans, wait for the running one, release all rows. Idempotent."""
        self._ended = True
        if self._cleared is None:
            for future in tuple(self._pending):
                future.cancel()
            self._cleared = self._thread.submit(self._runner.clear)
        await asyncio.shield(asyncio.wrap_future(self._cleared))

    def _launch(self, plan: Plan) -> PendingOutput[StepOutput | None]:
        """On the device thread. The output is None if the plan is discarded."""
        if self._ended or self._broken:
            return ReadyOutput(None)
        try:
            work: PendingOutput[StepOutput] = self._runner.launch(plan, self._thread.run_postponed)
        except Exception as error:
            # Earlier steps may still run, and are reported first. This one is ready at once, so it
            # is reported before the next queued plan is launched.
            work = Failed(error)
        return _StreamStep(self._finish, work)

    def _finish(self, launched: PendingOutput[StepOutput]) -> StepOutput | None:
        """On the device thread. None if an earlier step failed: this one read undefined state."""
        if self._broken:
            return None
        try:
            return launched.output()
        except Exception:
            self._broken = True
            raise

    def _report(self, plan: Plan, future: Future[StepOutput | None]) -> None:
        """On the device thread, unless the step was cancelled. Delivery is postponed until the next
        step computes, because the event loop and a launch compete for the interpreter."""
        deliver = partial(self._loop.call_soon_threadsafe, self._deliver, plan, future)
        if future.cancelled():
            deliver()
        else:
            self._thread.postpone(deliver)

    def _deliver(self, plan: Plan, future: Future[StepOutput | None]) -> None:
        self._pending.discard(future)
        if self._ended or future.cancelled():
            return
        if error := future.exception():
            log.error("step failed", step=plan.step, exc_info=error)
            message = f"step {plan.step} failed: {error}"
            self.end(failed(grpc.StatusCode.INTERNAL, "STEP_FAILED", message))
        elif output := future.result():
            result = result_to_proto(plan, output)
            self._responses.put_nowait(worker_pb2.ExecuteResponse(result=result))
            self._end_if_complete()

    def _end_if_complete(self) -> None:
        if self._complete and not self._pending:
            self._responses.put_nowait(None)


@dataclass(frozen=True)
class _StreamStep:
    """A launched step that is completed by the stream."""

    finish: Callable[[PendingOutput[StepOutput]], StepOutput | None]
    launched: PendingOutput[StepOutput]

    def is_ready(self) -> bool:
        return self.launched.is_ready()

    def output(self) -> StepOutput | None:
        return self.finish(self.launched)
