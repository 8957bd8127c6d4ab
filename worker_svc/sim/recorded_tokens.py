"""The tokens that another worker sampled."""

from collections.abc import Mapping
from pathlib import Path

from google.protobuf import proto
from google.protobuf.message import DecodeError

from quire.internal.v1 import worker_pb2
from worker_svc.settings import WrongSettingError

# By step, each row's token; a row that sampled none there has failed.
RecordedTokens = Mapping[int, Mapping[int, int]]


def read_tokens(path: Path) -> RecordedTokens:
    """All of a recording, up to an entry that was not written whole.

    OSError if there is no file, WrongSettingError if it is none of a worker.
    """
    found: dict[int, dict[int, int]] = {}
    with path.open("rb") as file:
        first = _next_entry(file)
        if first is None or not first.HasField("hello"):
            raise WrongSettingError(f"--sim-tokens: {path} is no recording of a worker")
        while (entry := _next_entry(file)) is not None:
            result = entry.result
            if entry.HasField("result"):
                tokens = zip(result.sampled_rows, result.sampled_token_ids, strict=True)
                found[result.step] = dict(tokens)
    return found


def _next_entry(file: object) -> worker_pb2.Recording | None:
    try:
        return proto.parse_length_prefixed(worker_pb2.Recording, file)  # type: ignore[arg-type]
    except (DecodeError, ValueError):
        return None
