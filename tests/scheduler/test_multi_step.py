"""Rounds of decoding in one plan."""

import pytest
from bare_groups import bare_group

from scheduler_svc.core.request import DEFERRED_TOKENS, Params
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.lane.multi_step import MAX_ROUNDS, MAX_ROUNDS_BEFORE_STOP, MultiStep


def sequence(
    tokens_per_frame: int = DEFERRED_TOKENS, stops: frozenset[int] = frozenset()
) -> Sequence:
    params = Params(temperature=0, top_k=0, top_p=1, seed=0, max_tokens=100)
    group = bare_group("one", params, tokens_per_frame)
    return Sequence(1, group, 0, [], 0, 0, stop_token_ids=stops)


def no_arrivals() -> float:
    return 60.0


def test_a_plan_has_as_many_rounds_as_fit_its_maximum_duration() -> None:
    multi_step = MultiStep(0.1, no_arrivals)
    assert multi_step.num_rounds([sequence()]) == 1
    for step_ms, num_rounds in ((20, 5), (33, 3), (50, 2), (51, 1), (300, 1), (1, MAX_ROUNDS)):
        multi_step.completed(step_ms / 1000)
        assert multi_step.num_rounds([sequence()]) == num_rounds


@pytest.mark.parametrize(
    ("since_last_arrival_s", "num_rounds"),
    [(0.0, 1), (0.15, 1), (0.25, 2), (0.35, 3), (0.65, 6), (60.0, 10)],
)
def test_a_plan_takes_at_most_a_tenth_of_the_time_since_the_last_arrival(
    since_last_arrival_s: float, num_rounds: int
) -> None:
    multi_step = MultiStep(0.1, lambda: since_last_arrival_s)
    multi_step.completed(0.01)
    assert multi_step.num_rounds([sequence()]) == num_rounds


@pytest.mark.parametrize("most_s", [0, 0.1])
def test_a_streamed_sequence_limits_the_plan_to_one_round(most_s: float) -> None:
    multi_step = MultiStep(most_s, no_arrivals)
    multi_step.completed(0.001)
    both = [sequence(), sequence(tokens_per_frame=1)]
    assert multi_step.num_rounds(both) == 1
    assert multi_step.num_rounds(both[:1]) == (MAX_ROUNDS if most_s else 1)


@pytest.mark.parametrize("interval", [2, 3, MAX_ROUNDS, MAX_ROUNDS + 1])
def test_a_plan_has_no_more_rounds_than_a_stream_gets_tokens_together(interval: int) -> None:
    multi_step = MultiStep(0.1, no_arrivals)
    multi_step.completed(0.001)
    both = [sequence(), sequence(tokens_per_frame=interval)]
    assert multi_step.num_rounds(both) == min(interval, MAX_ROUNDS)


def test_rounds_are_possible_while_two_fit_a_plan() -> None:
    multi_step = MultiStep(0.1, lambda: 0.25)
    assert not multi_step.is_possible()
    for step_ms, is_possible in ((12, True), (13, False)):
        multi_step.completed(step_ms / 1000)
        assert multi_step.is_possible() is is_possible


def test_stop_tokens_limit_the_rounds() -> None:
    multi_step = MultiStep(0.1, no_arrivals)
    multi_step.completed(0.001)
    both = [sequence(), sequence(stops=frozenset([7]))]
    assert multi_step.num_rounds(both) == MAX_ROUNDS_BEFORE_STOP
