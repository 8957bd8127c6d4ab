"""Beam search as in transformers' `generate` with `num_beams` (version 5). Pure.

transformers considers the (1 + number of stop tokens) * width best continuations of all beams. The
beams that go on are the best `width` of them that do not end; those that end become hypotheses if
they are among the best `width` of all. Each of both is among the best width + number of stop
tokens of its own beam, so these are all that a worker has to return.
"""

import struct
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from quire.service.beams import Beams, BeamStep, Continuation, Hypothesis

_FLOAT: Final = struct.Struct("<f")


class EarlyStopping(IntEnum):
    """When a search ends that has as many hypotheses as beams; the values are those of
    scheduler.proto."""

    # When the best beam, at its present length, is not better than the worst hypothesis.
    HEURISTIC = 1
    # At once.
    ALWAYS = 2
    # When the best beam cannot become better than the worst hypothesis: with a length penalty
    # above 0 it may at its full length.
    NEVER = 3


@dataclass(frozen=True, slots=True)
class SearchParams:
    width: int
    max_tokens: int
    length_penalty: float
    early_stopping: EarlyStopping
    stop_token_ids: Set[int]


class BeamSearch:
    """A search, step by step."""

    def __init__(self, params: SearchParams) -> None:
        self.params = params
        self.steps: list[BeamStep] = []
        self.is_done = False
        self._beams = Beams(params.width, params.length_penalty)

    @property
    def num_running(self) -> int:
        return len(self._beams.paths)

    @property
    def hypotheses(self) -> list[Hypothesis]:
        return self._beams.hypotheses

    def path(self, beam: int) -> "Sequence[int]":
        """The output tokens of a running beam."""
        return self._beams.paths[beam]

    def advance(self, candidates: Sequence[Iterable[tuple[int, float]]]) -> BeamStep:
        """Choose the next step by the most likely tokens of each running beam, with their
        log-probabilities: at least as many as `width` and the stop tokens together, if there are so
        many."""
        beams = self._beams
        found = [
            Continuation(parent, token_id, _as_float32(beams.logprobs[parent] + logprob))
            for parent, tokens in enumerate(candidates)
            for token_id, logprob in tokens
        ]
        found.sort(key=lambda one: (-one.logprob, one.parent, one.token_id))
        width = self.params.width
        step = BeamStep(
            running=tuple([one for one in found if not self._ends(one)][:width]),
            finished=tuple([one for one in found[:width] if self._ends(one)]),
        )
        self.add(step)
        return step

    def _ends(self, one: Continuation) -> bool:
        is_last = self._beams.num_tokens + 1 >= self.params.max_tokens
        return is_last or one.token_id in self.params.stop_token_ids

    def add(self, step: BeamStep) -> None:
        """Apply a step that was chosen before."""
        self.steps.append(step)
        self._beams.add(step)
        self.is_done = not step.running or not self._goes_on()

    def _goes_on(self) -> bool:
        beams, params = self._beams, self.params
        if beams.num_tokens >= params.max_tokens:
            return False
        if not beams.is_full:
            return True
        if params.early_stopping is EarlyStopping.ALWAYS:
            return False
        num_tokens = beams.num_tokens
        if params.early_stopping is EarlyStopping.NEVER and params.length_penalty > 0:
            num_tokens = params.max_tokens
        return beams.score(beams.logprobs[0], num_tokens) > beams.hypotheses[-1].score


def _as_float32(number: float) -> float:
    """Rounded as it is journaled, so that a recovered search goes on with the same numbers."""
    rounded: float = _FLOAT.unpack(_FLOAT.pack(number))[0]
    return rounded
