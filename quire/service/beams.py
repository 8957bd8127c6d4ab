"""The log of a beam search, which scheduler and gateway share, and what its output is. Pure.

A search is the sequence of its steps. Each names the beams that go on and the hypotheses that
ended, as continuations of beams of the step before; so the log alone has all tokens of all beams.
"""

import struct
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

MAX_BEAM_WIDTH: Final = 16
# Candidates per beam: the width, and one for each stop token.
MAX_CANDIDATES: Final = 32

_ENTRY: Final = struct.Struct("<IfI")
ENTRY_BYTES: Final = _ENTRY.size
# The parent of an entry without a beam.
_NO_PARENT: Final = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Continuation:
    """A beam of the step before, continued by a token."""

    parent: int  # the index of the beam; 0 in the first step
    token_id: int
    logprob: float  # cumulative, of all output tokens


@dataclass(frozen=True, slots=True)
class BeamStep:
    """One step of a search of a certain width."""

    # The beams that go on, most likely first: as many as the width; none in the last step.
    running: tuple[Continuation, ...]
    # Hypotheses that ended, most likely first; at most as many as the width.
    finished: tuple[Continuation, ...]

    def pack(self, width: int) -> bytes:
        """`num_entries(width)` entries: of beams, then of hypotheses. An entry is a token id (u32),
        a log-probability (f32) and a parent (u32), little-endian."""
        places = (*_padded(self.running, width), *_padded(self.finished, width))
        return b"".join([_pack(place) for place in places])

    @classmethod
    def unpack(cls, packed: bytes) -> "BeamStep":
        """ValueError unless `pack` has packed it."""
        if not packed or len(packed) % (2 * ENTRY_BYTES):
            raise ValueError(f"{len(packed)} bytes are no step of a beam search")
        entries = list(_ENTRY.iter_unpack(packed))
        width = len(entries) // 2
        return cls(_continuations(entries[:width]), _continuations(entries[width:]))

    @property
    def token_id(self) -> int:
        """That of the first entry: what stands for the step where a token is expected."""
        return self.running[0].token_id if self.running else 0


def num_entries(width: int) -> int:
    """The number of entries of a packed step."""
    return 2 * width


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One output of a search."""

    token_ids: "array[int]"  # with the stop token that ended it
    logprob: float  # cumulative
    score: float  # the log-probability, divided by a power of the number of tokens


class Beams:
    """The beams and hypotheses after the steps so far."""

    def __init__(self, width: int, length_penalty: float) -> None:
        self.width = width
        self.length_penalty = length_penalty
        self.num_tokens = 0
        # The output of each running beam.
        self.paths: list[array[int]] = [array("I")]
        self.logprobs: list[float] = [0.0]
        # The best `width` so far, highest score first; of equal ones, the earlier first.
        self.hypotheses: list[Hypothesis] = []

    @property
    def is_full(self) -> bool:
        return len(self.hypotheses) == self.width

    def score(self, logprob: float, num_tokens: int) -> float:
        return float(logprob / num_tokens**self.length_penalty)

    def add(self, step: BeamStep) -> None:
        """Apply the next step. ValueError if it continues a beam that does not exist."""
        for one in (*step.running, *step.finished):
            if one.parent >= len(self.paths):
                raise ValueError(f"beam {one.parent} of {len(self.paths)} is continued")
        self.num_tokens += 1
        ended = [
            Hypothesis(self._path(one), one.logprob, self.score(one.logprob, self.num_tokens))
            for one in step.finished
        ]
        best = sorted([*self.hypotheses, *ended], key=lambda one: -one.score)
        self.hypotheses = best[: self.width]
        self.paths = [self._path(one) for one in step.running]
        self.logprobs = [one.logprob for one in step.running]

    def _path(self, one: Continuation) -> "array[int]":
        return self.paths[one.parent] + array("I", [one.token_id])


def hypotheses_of(steps: Iterable[BeamStep], width: int, length_penalty: float) -> list[Hypothesis]:
    """The output of a search that has ended, best first."""
    beams = Beams(width, length_penalty)
    for step in steps:
        beams.add(step)
    return beams.hypotheses


def _padded(continuations: Sequence[Continuation], width: int) -> list[Continuation | None]:
    return [*continuations, *[None] * (width - len(continuations))]


def _pack(place: Continuation | None) -> bytes:
    if place is None:
        return _ENTRY.pack(0, 0.0, _NO_PARENT)
    return _ENTRY.pack(place.token_id, place.logprob, place.parent)


def _continuations(entries: list[tuple[int, float, int]]) -> tuple[Continuation, ...]:
    return tuple(
        Continuation(parent, token_id, logprob)
        for token_id, logprob, parent in entries
        if parent != _NO_PARENT
    )
