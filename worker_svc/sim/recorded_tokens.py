"""The tokens that another worker sampled."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from google.protobuf import proto
from google.protobuf.message import DecodeError

from quire.internal.v1 import worker_pb2
from worker_svc.logprobs import Logprobs
from worker_svc.settings import WrongSettingError


@dataclass(frozen=True)
class RecordedStep:
    """What one plan gave."""

    token_ids: Mapping[int, int]  # by row; a row that sampled none has failed
    logprobs: Logprobs | None = None


RecordedSteps = Mapping[int, RecordedStep]


def read_tokens(path: Path) -> RecordedSteps:
    """All of a recording, up to an entry that was not written whole.

    OSError if there is no file, WrongSettingError if it is none of a worker.
    """
    found: dict[int, RecordedStep] = {}
    with path.open("rb") as file:
        first = _next_entry(file)
        if first is None or not first.HasField("hello"):
            raise WrongSettingError(f"--sim-tokens: {path} is no recording of a worker")
        while (entry := _next_entry(file)) is not None:
            if entry.HasField("result"):
                found[entry.result.step] = _recorded(entry.result)
    return found


def _recorded(result: worker_pb2.StepResult) -> RecordedStep:
    tokens = zip(result.sampled_rows, result.sampled_token_ids, strict=True)
    logprobs = Logprobs.from_proto(result.logprobs) if result.HasField("logprobs") else None
    return RecordedStep(dict(tokens), logprobs)


def _next_entry(file: object) -> worker_pb2.Recording | None:
    try:
        return proto.parse_length_prefixed(worker_pb2.Recording, file)  # type: ignore[arg-type]
    except (DecodeError, ValueError):
        return None
