"""Sends recorded plans to a worker, as a scheduler does."""

import queue
import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import cast

import grpc

from quire.client.errors import QuireError, from_status
from quire.internal.v1 import worker_pb2, worker_pb2_grpc
from quire.replay.recording import RecordedStep, RecordingError, read_hello, read_lanes
from quire.service.protocol_version import PROTOCOL_VERSION

_HOLDER = b"quire replay"
# Log-probabilities that differ by at most this are equal.
_TOLERANCE = 1e-3
_AT_LEAST = (
    *("num_blocks", "num_host_blocks"),
    *("max_num_seqs", "max_model_len", "max_num_batched_tokens"),
)


@dataclass(frozen=True)
class ReplayedStep:
    """A recorded step and its new result."""

    recorded: RecordedStep
    result: worker_pb2.StepResult | None
    # The cause if there is no result.
    error: str = ""

    @property
    def difference(self) -> str | None:
        """The first difference from the recorded result, apart from times; None if equal."""
        before, now = self.recorded.result, self.result
        if before is None or now is None:
            return (
                None if before is now else f"{_ended(now, self.error)}, recorded: {_ended(before)}"
            )
        if _failed(before) != _failed(now):
            return f"failed rows {_failed(now)}, recorded {_failed(before)}"
        if list(before.sampled_rows) != list(now.sampled_rows):
            return f"sampled rows {list(now.sampled_rows)}, recorded {list(before.sampled_rows)}"
        tokens = zip(now.sampled_rows, now.sampled_token_ids, before.sampled_token_ids, strict=True)
        for row, token, recorded in tokens:
            if token != recorded:
                return f"row {row} sampled {token}, recorded {recorded}"
        return _logprob_difference(now, before)


def replay(path: Path, target: str, channel: grpc.Channel, depth: int) -> Iterator[ReplayedStep]:
    """Replay all recorded steps in order, with up to `depth` plans in flight.

    RecordingError if the worker is too small for the recording, QuireError if its calls fail.
    """
    if depth < 1:
        raise ValueError(f"depth: must be at least 1 (got {depth})")
    hello = read_hello(path)
    stub = worker_pb2_grpc.WorkerServiceStub(channel)
    for steps in read_lanes(path):
        first = next(steps, None)
        if first is not None:
            lane = _Lane(stub, target, first.plan.epoch)
            _require_fit(hello, lane.hello)
            yield from lane.run(chain([first], steps), depth)


class _Lane:
    """One Execute stream."""

    def __init__(self, stub: worker_pb2_grpc.WorkerServiceStub, target: str, epoch: int) -> None:
        self._target = target
        self._requests: queue.SimpleQueue[worker_pb2.ExecuteRequest | None] = queue.SimpleQueue()
        opening = worker_pb2.OpenLane(
            epoch=epoch, holder=_HOLDER, protocol_version=PROTOCOL_VERSION
        )
        self._requests.put(worker_pb2.ExecuteRequest(open=opening))
        self._responses = stub.Execute(iter(self._requests.get, None))
        try:
            self.hello = next(self._responses).hello
        except grpc.RpcError as error:
            self._requests.put(None)
            raise from_status(cast(grpc.Call, error), target) from error

    def run(self, steps: Iterator[RecordedStep], depth: int) -> Iterator[ReplayedStep]:
        """Run steps until one fails."""
        in_flight: deque[RecordedStep] = deque()
        try:
            for step in steps:
                if len(in_flight) == depth:
                    result = self._next_result()
                    yield ReplayedStep(in_flight.popleft(), result)
                in_flight.append(step)
                self._requests.put(worker_pb2.ExecuteRequest(plan=step.plan))
            self._requests.put(None)
            while in_flight:
                result = self._next_result()
                yield ReplayedStep(in_flight.popleft(), result)
        except grpc.RpcError as error:
            call = cast(grpc.Call, error)
            if call.code() is not grpc.StatusCode.INTERNAL:
                raise from_status(call, self._target) from error
            yield ReplayedStep(in_flight.popleft(), None, str(call.details()))
            # The failure ended the lane, so its other steps are skipped.
            deque(steps, maxlen=0)
        finally:
            self._requests.put(None)

    def _next_result(self) -> worker_pb2.StepResult:
        for response in self._responses:
            if response.HasField("result"):
                return response.result
        raise QuireError(grpc.StatusCode.ABORTED, "the worker closed the lane")


def _require_fit(recorded: worker_pb2.Hello, worker: worker_pb2.Hello) -> None:
    wrong = ["block_size"] if worker.block_size != recorded.block_size else []
    wrong += [n for n in _AT_LEAST if getattr(worker, n) < getattr(recorded, n)]
    if wrong:
        values = [f"{n} {getattr(worker, n)}, recorded {getattr(recorded, n)}" for n in wrong]
        raise RecordingError(f"the worker does not fit the recording: {'; '.join(values)}")


def _logprob_difference(now: worker_pb2.StepResult, before: worker_pb2.StepResult) -> str | None:
    for row, one, other in zip(now.sampled_rows, _entries(now), _entries(before), strict=True):
        if not _same_entries(one, other):
            return f"row {row} has log-probabilities {one}, recorded {other}"
    if _prompt_ranges(now) != _prompt_ranges(before):
        return "log-probabilities are of other tokens of prompts than recorded"
    if not _same_entries(_prompt_entries(now), _prompt_entries(before)):
        return "prompts have other log-probabilities than recorded"
    return None


def _prompt_ranges(result: worker_pb2.StepResult) -> list[tuple[int, ...]]:
    found = result.prompt_logprobs
    columns = (found.rows, found.first_indices, found.num_tokens, found.num_entries)
    return list(zip(*columns, strict=True))


def _prompt_entries(result: worker_pb2.StepResult) -> list[tuple[int, int, float]]:
    unpacked = struct.iter_unpack("<IfI", result.prompt_logprobs.logprobs)
    return [(token_id, rank, logprob) for token_id, logprob, rank in unpacked]


def _entries(result: worker_pb2.StepResult) -> Iterator[list[tuple[int, int, float]]]:
    """Yield token id, rank and log-probability of all entries, per sampled token."""
    found = result.logprobs
    entries = zip(found.token_ids, found.ranks, found.logprobs, strict=True)
    for count in found.num_entries or [0] * len(result.sampled_rows):
        yield list(islice(entries, count))


def _same_entries(one: list[tuple[int, int, float]], other: list[tuple[int, int, float]]) -> bool:
    return [entry[:2] for entry in one] == [entry[:2] for entry in other] and all(
        abs(a[2] - b[2]) <= _TOLERANCE for a, b in zip(one, other, strict=True)
    )


def _failed(result: worker_pb2.StepResult) -> list[int]:
    return sorted(failure.row for failure in result.failures)


def _ended(result: worker_pb2.StepResult | None, error: str = "") -> str:
    return f"the step failed {error}".rstrip() if result is None else "a result"
