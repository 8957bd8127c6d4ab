"""How long an idle lane waits for more requests."""

import pytest

from scheduler_svc.core.arrivals import Arrivals
from scheduler_svc.lanes.company import Company


class Clock:
    now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


class Case:
    """Requests that come to one lane."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.arrivals = Arrivals(self.clock)
        self.company = Company(True, self.arrivals.quiet_s, self.clock)

    def somebody_comes(self, *, is_first: bool = False) -> None:
        self.arrivals.queued()
        if is_first:
            self.company.first_came()

    def left_s(self) -> float:
        return self.company.left_s()


@pytest.fixture
def case() -> Case:
    case = Case()
    case.clock.now_s += 10
    assert case.left_s() == 0
    case.somebody_comes(is_first=True)
    return case


def test_the_next_one_has_two_milliseconds(case):
    assert case.left_s() == pytest.approx(0.002)
    case.clock.now_s += 0.0015
    assert case.left_s() == pytest.approx(0.0005)
    case.somebody_comes()
    assert case.left_s() == pytest.approx(0.002)
    case.clock.now_s += 0.0021
    assert case.left_s() < 0


def test_all_of_them_have_twenty(case):
    for _ in range(19):
        case.clock.now_s += 0.001
        case.somebody_comes()
    assert case.left_s() == pytest.approx(0.001)
    case.clock.now_s += 0.0011
    case.somebody_comes()
    assert case.left_s() < 0
    case.somebody_comes(is_first=True)
    assert case.left_s() == pytest.approx(0.002)


@pytest.mark.parametrize(("token_s", "gap_s"), [(0.0, 0.002), (0.005, 0.005), (3.0, 0.01)])
def test_the_next_one_has_as_long_as_a_token_takes(case, token_s, gap_s):
    case.company.decoded(token_s)
    assert case.left_s() == pytest.approx(gap_s)


def test_who_is_being_recorded_is_awaited(case):
    with case.arrivals.coming(2):
        case.clock.now_s += 0.015
        assert case.left_s() == pytest.approx(0.002)
        case.clock.now_s += 0.004
        assert case.left_s() == pytest.approx(0.001)
        case.clock.now_s += 0.002
        assert case.left_s() < 0
    case.somebody_comes(is_first=True)
    with case.arrivals.coming(1):
        case.clock.now_s += 0.015
    # It was refused.
    assert case.left_s() < 0


def test_who_had_to_wait_for_its_lane_waits_for_nobody(case):
    case.clock.now_s += 3
    case.company.first_came()
    assert case.left_s() < 0


def test_nobody_is_awaited_where_that_is_switched_off(case):
    company = Company(False, case.arrivals.quiet_s, case.clock)
    company.first_came()
    assert company.left_s() == 0


def test_while_the_first_plan_is_computed_there_is_time_as_long_as_somebody_comes(case):
    case.company.sent(7)
    for step in range(8, 108):
        case.clock.now_s += 0.0015
        assert case.left_s() == pytest.approx(0.0005)
        case.somebody_comes()
        case.company.sent(step)
    case.company.landed(7)
    assert case.left_s() == 0


def test_plans_of_those_who_were_there_before_are_not_the_first(case):
    case.company.landed(3)
    assert case.left_s() == pytest.approx(0.002)
    case.company.sent(5)
    case.company.landed(4)
    assert case.left_s() == pytest.approx(0.002)
    case.company.landed(5)
    assert case.left_s() == 0
    case.company.landed(6)
    case.somebody_comes(is_first=True)
    case.company.landed(6)
    assert case.left_s() == pytest.approx(0.002)
