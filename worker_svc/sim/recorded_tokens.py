"""Reads the sampled tokens of a recording, to sample them again."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path

from google.protobuf import proto
from google.protobuf.message import DecodeError

from quire.internal.v1 import worker_pb2
from worker_svc.errors import WrongSettingError
from worker_svc.plan.logprobs import Logprobs
from worker_svc.plan.prompt_logprobs import PromptLogprobs


@dataclass(frozen=True)
class RecordedStep:
    """The result of one round of a plan."""

    token_ids: Mapping[int, int]  # by row; a missing row has failed, or has waited
    jumps: Mapping[int, Sequence[int]] = field(default_factory=dict)  # by row
    logprobs: Logprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None
    failed: frozenset[int] = frozenset()  # rows, of any round


# The rounds of each step, without those in which no row sampled.
RecordedSteps = Mapping[int, Sequence[RecordedStep]]


def read_tokens(path: Path) -> RecordedSteps:
    """Read a recording up to the first incomplete entry. OSError if there is no file,
    WrongSettingError if it is not a recording."""
    found: dict[int, list[RecordedStep]] = {}
    with path.open("rb") as file:
        first = _next_entry(file)
        if first is None or not first.HasField("hello"):
            raise WrongSettingError(f"--sim-tokens: {path} is not a recording of a worker")
        if first.hello.num_speculative_tokens:
            raise WrongSettingError(
                f"--sim-tokens: {path} is the recording of a worker that speculates, whose steps "
                "the simulation does not repeat; record it with --num-speculative-tokens=0"
            )
        while (entry := _next_entry(file)) is not None:
            if entry.HasField("result"):
                found[entry.result.step] = list(rounds_of(entry.result))
    return found


def rounds_of(result: worker_pb2.StepResult) -> Iterator[RecordedStep]:
    """The rounds of the result of a plan."""
    tokens = list(zip(result.sampled_rows, result.sampled_token_ids, strict=True))
    logprobs = Logprobs.from_proto(result.logprobs) if result.HasField("logprobs") else None
    # Only the first round may compute prompt tokens.
    of_prompts = (
        PromptLogprobs.from_proto(result.prompt_logprobs)
        if result.HasField("prompt_logprobs")
        else None
    )
    forced = set(result.forced_indices)
    failed = frozenset(failure.row for failure in result.failures)
    sizes = result.round_sizes or [len(tokens)]
    for number, (start, end) in enumerate(pairwise(accumulate(sizes, initial=0))):
        sampled, jumps = {}, defaultdict[int, list[int]](list)
        for index in range(start, end):
            row, token_id = tokens[index]
            if index in forced:
                jumps[row].append(token_id)
            else:
                sampled[row] = token_id
        part = None if logprobs is None else logprobs.part(start, start + len(sampled))
        yield RecordedStep(sampled, jumps, part, None if number else of_prompts, failed)


def _next_entry(file: object) -> worker_pb2.Recording | None:
    try:
        return proto.parse_length_prefixed(worker_pb2.Recording, file)  # type: ignore[arg-type]
    except (DecodeError, ValueError):
        return None
