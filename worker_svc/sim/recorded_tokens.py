"""The tokens that another worker sampled."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from google.protobuf import proto
from google.protobuf.message import DecodeError

from quire.internal.v1 import worker_pb2
from worker_svc.logprobs import Logprobs
from worker_svc.settings import WrongSettingError


@dataclass(frozen=True)
class RecordedStep:
    """What one round of a plan gave."""

    token_ids: Mapping[int, int]  # by row; a row that sampled none has failed
    logprobs: Logprobs | None = None


# Its rounds, by step. Of those in which no row gave a token there is none.
RecordedSteps = Mapping[int, Sequence[RecordedStep]]


def read_tokens(path: Path) -> RecordedSteps:
    """All of a recording, up to an entry that was not written whole.

    OSError if there is no file, WrongSettingError if it is none of a worker.
    """
    found: dict[int, list[RecordedStep]] = {}
    with path.open("rb") as file:
        first = _next_entry(file)
        if first is None or not first.HasField("hello"):
            raise WrongSettingError(f"--sim-tokens: {path} is no recording of a worker")
        while (entry := _next_entry(file)) is not None:
            if entry.HasField("result"):
                found[entry.result.step] = list(_rounds(entry.result))
    return found


def _rounds(result: worker_pb2.StepResult) -> Iterator[RecordedStep]:
    tokens = list(zip(result.sampled_rows, result.sampled_token_ids, strict=True))
    logprobs = Logprobs.from_proto(result.logprobs) if result.HasField("logprobs") else None
    starts = _starts(result.sampled_rows)
    for start, end in pairwise([*starts, len(tokens)]):
        part = None if logprobs is None else logprobs.part(start, end)
        yield RecordedStep(dict(tokens[start:end]), part)


def _starts(sampled_rows: Iterable[int]) -> list[int]:
    """Where rounds begin: a row stands once in each."""
    starts, met = [0], set[int]()
    for at, row in enumerate(sampled_rows):
        if row in met:
            starts.append(at)
            met.clear()
        met.add(row)
    return starts


def _next_entry(file: object) -> worker_pb2.Recording | None:
    try:
        return proto.parse_length_prefixed(worker_pb2.Recording, file)  # type: ignore[arg-type]
    except (DecodeError, ValueError):
        return None
