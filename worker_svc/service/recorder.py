"""Records a stream's plans and results in a file."""

import contextlib
import fcntl
import io
import queue
import threading
from dataclasses import dataclass
from pathlib import Path

import structlog
from google.protobuf import proto

from quire.internal.v1 import worker_pb2
from worker_svc.plan.plans import Plan, StepOutput, plan_to_proto, result_to_proto
from worker_svc.runner.step_runner import Callback, Failed, PendingOutput, StepRunner, no_op

log = structlog.get_logger()

# Entries that may wait for the disk.
_MAX_QUEUED = 4096
# For an entry, when the worker ends.
_CLOSE_S = 5.0
_Entry = worker_pb2.Hello | Plan | tuple[Plan, StepOutput] | worker_pb2.RowsCleared


class Recorder:
    """Writes entries in a thread of its own, unbuffered.

    A disk that is full or too slow ends the recording, with one log record; the worker continues.
    OSError if the file cannot be opened, or if another recorder writes it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        # Locked before it is opened for writing, which truncates it.
        self._lock = path.open("ab")
        _lock(self._lock, path)
        self._file = path.open("wb", buffering=0)
        self._entries: queue.Queue[_Entry | None] = queue.Queue(_MAX_QUEUED)
        self._stopped = False
        self._thread = threading.Thread(target=self._write_all, name="recorder", daemon=True)
        self._thread.start()

    def put(self, entry: _Entry) -> None:
        """Queue an entry; never blocks."""
        if self._stopped:
            return
        try:
            self._entries.put_nowait(entry)
        except queue.Full:
            self._stop("the disk is too slow")

    def close(self) -> None:
        """Write the queued entries, unless the disk hangs."""
        with contextlib.suppress(queue.Full):
            self._entries.put(None, timeout=_CLOSE_S)
        num_left = _MAX_QUEUED + 1
        while self._thread.is_alive() and (now_left := self._entries.qsize()) < num_left:
            num_left = now_left
            self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            log.warning("the recording is not complete: the disk hangs", file=str(self._path))

    def _write_all(self) -> None:
        with self._lock, self._file:
            while (entry := self._entries.get()) is not None:
                if not self._stopped:
                    self._write(entry)

    def _write(self, entry: _Entry) -> None:
        data = io.BytesIO()
        for message in _messages(entry):
            proto.serialize_length_prefixed(message, data)
        try:
            if self._file.write(data.getvalue()) != data.tell():
                self._stop("the disk is full")
        except OSError as error:
            self._stop(str(error))

    def _stop(self, reason: str) -> None:
        self._stopped = True
        log.error("recording ended", file=str(self._path), reason=reason)


class RecordingRunner:
    """Runs plans on another runner and records them."""

    def __init__(self, runner: StepRunner, recorder: Recorder) -> None:
        self._runner = runner
        self._recorder = recorder

    @property
    def last_finished_step(self) -> int:
        return self._runner.last_finished_step

    def launch(self, plan: Plan, before_blocking: Callback = no_op) -> PendingOutput[StepOutput]:
        try:
            launched: PendingOutput[StepOutput] = self._runner.launch(plan, before_blocking)
        except Exception as error:
            # Earlier steps may have no result yet, and the file keeps their order.
            launched = Failed(error)
        return _RecordedStep(plan, launched, self._recorder)

    def clear(self) -> None:
        self._runner.clear()
        self._recorder.put(worker_pb2.RowsCleared())


@dataclass(frozen=True)
class _RecordedStep:
    """A launched step that is recorded when it ends."""

    plan: Plan
    launched: PendingOutput[StepOutput]
    recorder: Recorder

    def is_ready(self) -> bool:
        return self.launched.is_ready()

    def output(self) -> StepOutput:
        try:
            output = self.launched.output()
        except Exception:
            self.recorder.put(self.plan)
            raise
        self.recorder.put((self.plan, output))
        return output


def _lock(file: io.BufferedWriter, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise BlockingIOError(f"--record: another worker writes {path}") from error


def _messages(entry: _Entry) -> list[worker_pb2.Recording]:
    if isinstance(entry, worker_pb2.Hello):
        return [worker_pb2.Recording(hello=entry)]
    if isinstance(entry, worker_pb2.RowsCleared):
        return [worker_pb2.Recording(rows_cleared=entry)]
    if isinstance(entry, Plan):
        return [worker_pb2.Recording(plan=plan_to_proto(entry))]
    plan, output = entry
    return [
        worker_pb2.Recording(plan=plan_to_proto(plan)),
        worker_pb2.Recording(result=result_to_proto(plan, output)),
    ]
