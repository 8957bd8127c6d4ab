"""Reads a worker's recording entry by entry."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from google.protobuf import proto
from google.protobuf.message import DecodeError

from quire.internal.v1 import worker_pb2


class RecordingError(ValueError):
    """A file is not a recording, or lacks what was requested."""


@dataclass(frozen=True)
class RecordedStep:
    """A plan and its result; None if the step failed."""

    plan: worker_pb2.BatchPlan
    result: worker_pb2.StepResult | None


def read_hello(path: Path) -> worker_pb2.Hello:
    """The hello of the recorded worker. RecordingError or OSError if the file has none."""
    try:
        first = next(read_entries(path), worker_pb2.Recording())
    except RecordingError:
        first = worker_pb2.Recording()
    if not first.HasField("hello"):
        raise RecordingError(f"{path} is not a recording of a worker")
    return first.hello


def read_entries(path: Path) -> Iterator[worker_pb2.Recording]:
    """Yield all entries. Ignores a truncated last entry, which a killed worker leaves.

    RecordingError for a damaged entry before the last.
    """
    with path.open("rb") as file:
        while True:
            try:
                entry = proto.parse_length_prefixed(worker_pb2.Recording, file)  # type: ignore[arg-type]
            except (DecodeError, ValueError) as error:
                end = file.tell()
                if file.read(1):
                    raise RecordingError(f"{path} is damaged before byte {end}") from error
                return
            if entry is None:
                return
            yield entry


def read_lanes(path: Path) -> Iterator[Iterator[RecordedStep]]:
    """Yield lane after lane; each has to be read to its end before the next."""
    entries = read_entries(path)
    open_lanes = [True]
    while open_lanes:
        open_lanes.clear()
        yield _lane(entries, open_lanes)


def _lane(
    entries: Iterable[worker_pb2.Recording], open_lanes: list[bool]
) -> Iterator[RecordedStep]:
    """Yield the steps of a lane; extend `open_lanes` if another lane follows."""
    plan: worker_pb2.BatchPlan | None = None
    for entry in entries:
        kind = entry.WhichOneof("entry")
        if kind == "result" and plan is not None:
            yield RecordedStep(plan, entry.result)
            plan = None
            continue
        if plan is not None:
            yield RecordedStep(plan, None)
        plan = entry.plan if kind == "plan" else None
        if kind == "rows_cleared":
            open_lanes.append(True)
            return
