"""How often decodes run in one plan."""

from dataclasses import dataclass, field

import pytest

from scheduler_svc.core.sequence import Group, Nobody, Params, Sequence
from scheduler_svc.lanes.multi_step import MOST_ROUNDS, MOST_ROUNDS_TO_A_STOP, MultiStep
from scheduler_svc.store.requests import RequestKey

MS = 10**6


def sequence(*, is_patient: bool = True, stops: frozenset[int] = frozenset()) -> Sequence:
    params = Params(temperature=0, top_k=0, top_p=1, seed=0, max_tokens=100)
    group = Group(RequestKey("", "one"), params, Nobody(), is_patient=is_patient)
    return Sequence(1, group, 0, [], 0, 0, stop_token_ids=stops)


@dataclass
class Clock:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Case:
    clock: Clock = field(default_factory=Clock)

    def of(self, most_s: float = 0.1) -> MultiStep:
        multi_step = MultiStep(most_s, self.clock)
        multi_step.somebody_came()
        self.clock.now_s += 60
        return multi_step


def test_a_plan_has_as_many_rounds_as_there_is_time_for() -> None:
    multi_step = Case().of(0.1)
    assert multi_step.num_rounds([sequence()]) == 1
    for step_ms, num_rounds in ((20, 5), (33, 3), (50, 2), (51, 1), (300, 1), (1, MOST_ROUNDS)):
        multi_step.landed(1, step_ms * MS)
        assert multi_step.num_rounds([sequence()]) == num_rounds
    # Of a plan that had four already.
    multi_step.landed(4, 100 * MS)
    assert multi_step.num_rounds([sequence()]) == 4


def test_who_comes_is_expected_again() -> None:
    case = Case()
    multi_step = case.of(0.1)
    multi_step.landed(1, 10 * MS)
    multi_step.somebody_came()
    found = []
    for later_s in (0.15, 0.1, 0.1, 0.3, 60):
        case.clock.now_s += later_s
        found.append(multi_step.num_rounds([sequence()]))
    assert found == [1, 2, 3, 6, MOST_ROUNDS]


@pytest.mark.parametrize("most_s", [0, 0.1])
def test_nobody_waits_for_a_second_token_that_is_read_as_it_comes(most_s: float) -> None:
    multi_step = Case().of(most_s)
    multi_step.landed(1, MS)
    both = [sequence(), sequence(is_patient=False)]
    assert multi_step.num_rounds(both) == 1
    assert multi_step.num_rounds(both[:1]) == (MOST_ROUNDS if most_s else 1)


def test_behind_a_stop_token_little_is_lost() -> None:
    multi_step = Case().of()
    multi_step.landed(1, MS)
    both = [sequence(), sequence(stops=frozenset([7]))]
    assert multi_step.num_rounds(both) == MOST_ROUNDS_TO_A_STOP
