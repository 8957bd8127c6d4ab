"""How often decodes run in one plan."""

import pytest

from scheduler_svc.core.sequence import Group, Nobody, Params, Sequence
from scheduler_svc.lanes.multi_step import MOST_ROUNDS, MOST_ROUNDS_TO_A_STOP, MultiStep
from scheduler_svc.store.requests import RequestKey


def sequence(*, is_patient: bool = True, stops: frozenset[int] = frozenset()) -> Sequence:
    params = Params(temperature=0, top_k=0, top_p=1, seed=0, max_tokens=100)
    group = Group(RequestKey("", "one"), params, Nobody(), is_patient=is_patient)
    return Sequence(1, group, 0, [], 0, 0, stop_token_ids=stops)


def long_quiet() -> float:
    return 60.0


def test_a_plan_has_as_many_rounds_as_there_is_time_for() -> None:
    multi_step = MultiStep(0.1, long_quiet)
    assert multi_step.num_rounds([sequence()]) == 1
    for step_ms, num_rounds in ((20, 5), (33, 3), (50, 2), (51, 1), (300, 1), (1, MOST_ROUNDS)):
        multi_step.landed(step_ms / 1000)
        assert multi_step.num_rounds([sequence()]) == num_rounds


@pytest.mark.parametrize(
    ("quiet_s", "num_rounds"),
    [(0.0, 1), (0.15, 1), (0.25, 2), (0.35, 3), (0.65, 6), (60.0, 10)],
)
def test_who_comes_is_expected_again(quiet_s: float, num_rounds: int) -> None:
    multi_step = MultiStep(0.1, lambda: quiet_s)
    multi_step.landed(0.01)
    assert multi_step.num_rounds([sequence()]) == num_rounds


@pytest.mark.parametrize("most_s", [0, 0.1])
def test_nobody_waits_for_a_second_token_that_is_read_as_it_comes(most_s: float) -> None:
    multi_step = MultiStep(most_s, long_quiet)
    multi_step.landed(0.001)
    both = [sequence(), sequence(is_patient=False)]
    assert multi_step.num_rounds(both) == 1
    assert multi_step.num_rounds(both[:1]) == (MOST_ROUNDS if most_s else 1)


def test_behind_a_stop_token_little_is_lost() -> None:
    multi_step = MultiStep(0.1, long_quiet)
    multi_step.landed(0.001)
    both = [sequence(), sequence(stops=frozenset([7]))]
    assert multi_step.num_rounds(both) == MOST_ROUNDS_TO_A_STOP
