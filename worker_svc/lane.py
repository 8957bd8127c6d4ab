"""The worker's side of one lane: plans in, results out, in the same order."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import grpc
import structlog

from quire.internal.v1 import worker_pb2
from quire.service.errors import RequestError, failed
from worker_svc.device_thread import DeviceThread
from worker_svc.plans import Plan, StepOutput, result_to_proto
from worker_svc.step_runner import Failed, Finished, Launched, StepRunner

log = structlog.get_logger()


class Lane:
    """Queues plans for the device thread and gathers what the stream is to say.

    Lives on the event loop; only `_launch`, `_finish` and `_report` are called on the device
    thread. Results keep the order of the plans because one thread launches them, and settles and
    reports each in its turn.
    """

    def __init__(self, epoch: int, thread: DeviceThread, runner: StepRunner) -> None:
        self._epoch = epoch
        self._thread = thread
        self._runner = runner
        self._loop = asyncio.get_running_loop()
        self._last_step = 0
        self._has_work = False  # a plan has come that runs rows
        self._pending: set[Future[StepOutput | None]] = set()
        self._responses: asyncio.Queue[worker_pb2.ExecuteResponse | RequestError | None] = (
            asyncio.Queue()
        )
        self._ended = False  # no plan is run and nothing is sent any more
        self._broken = False  # a step failed; set on the device thread
        self._complete = False  # the scheduler sends no more plans
        self._cleared: Future[None] | None = None

    def submit(self, plan: Plan) -> None:
        """Queues a plan. RequestError for one of another epoch or out of order."""
        if plan.epoch != self._epoch:
            message = f"a plan of epoch {plan.epoch} on a lane of epoch {self._epoch}"
            raise failed(grpc.StatusCode.FAILED_PRECONDITION, "WRONG_EPOCH", message)
        if plan.step <= self._last_step:
            message = f"step {plan.step} after step {self._last_step}"
            raise failed(grpc.StatusCode.FAILED_PRECONDITION, "STEP_OUT_OF_ORDER", message)
        if self._ended:
            return
        self._last_step = plan.step
        if not self._has_work and len(plan.rows):
            self._has_work = True
            log.info("first work", step=plan.step)
        report = partial(self._report, plan)
        self._pending.add(self._thread.launch(partial(self._launch, plan), report))

    def send(self, response: worker_pb2.ExecuteResponse) -> None:
        self._responses.put_nowait(response)

    async def responses(self) -> AsyncIterator[worker_pb2.ExecuteResponse]:
        """Until the scheduler has closed the lane and has every result; raises what ended it."""
        while (response := await self._responses.get()) is not None:
            if isinstance(response, RequestError):
                raise response
            yield response

    def complete(self) -> None:
        """No plan follows: the stream ends after the last result."""
        self._complete = True
        self._end_if_complete()

    def end(self, error: RequestError) -> None:
        """Ends the stream with `error`, after what it has to say already."""
        if not self._ended:
            self._ended = True
            self._responses.put_nowait(error)

    async def close(self) -> None:
        """Discards queued plans, lets the running one finish, drops all rows. May be repeated."""
        self._ended = True
        if self._cleared is None:
            for future in tuple(self._pending):
                future.cancel()
            self._cleared = self._thread.submit(self._runner.clear)
        await asyncio.shield(asyncio.wrap_future(self._cleared))

    def _launch(self, plan: Plan) -> Launched[StepOutput | None]:
        """On the device thread. The output is None if the plan is discarded."""
        if self._ended or self._broken:
            return Finished(None)
        try:
            launched: Launched[StepOutput] = self._runner.launch(plan, self._thread.make_held_calls)
        except Exception as error:
            # Steps before it may still be on the device, and are to be told of first. Over at
            # once, it is heard of before the next queued plan starts.
            launched = Failed(error)
        return _LaneStep(self._finish, launched)

    def _finish(self, launched: Launched[StepOutput]) -> StepOutput | None:
        """On the device thread. None if a step before has failed: nothing this one read is known
        to be right."""
        if self._broken:
            return None
        try:
            return launched.output()
        except Exception:
            self._broken = True
            raise

    def _report(self, plan: Plan, future: Future[StepOutput | None]) -> None:
        """On the device thread, where the step was not cancelled. The loop is to wake when the next
        step computes: the interpreter serves one of them at a time."""
        deliver = partial(self._loop.call_soon_threadsafe, self._deliver, plan, future)
        if future.cancelled():
            deliver()
        else:
            self._thread.hold(deliver)

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
class _LaneStep:
    """A launched step, whose end the lane hears of."""

    finish: Callable[[Launched[StepOutput]], StepOutput | None]
    launched: Launched[StepOutput]

    def is_ready(self) -> bool:
        return self.launched.is_ready()

    def output(self) -> StepOutput | None:
        return self.finish(self.launched)
