"""The batch window of an idle lane."""

import pytest

from scheduler_svc.core.queue import Arrivals
from scheduler_svc.lane.batch_window import BatchWindow


class Clock:
    now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


class Case:
    """Requests that arrive at one lane."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.arrivals = Arrivals(self.clock)
        self.window = BatchWindow(True, self.arrivals.since_last_arrival_s, self.clock)

    def arrive(self, *, is_first: bool = False) -> None:
        self.arrivals.queued()
        if is_first:
            self.window.open()

    def remaining_s(self) -> float:
        return self.window.remaining_s()


@pytest.fixture
def case() -> Case:
    case = Case()
    case.clock.now_s += 10
    assert case.remaining_s() == 0
    case.arrive(is_first=True)
    return case


def test_the_window_closes_two_milliseconds_after_the_last_arrival(case):
    assert case.remaining_s() == pytest.approx(0.002)
    case.clock.now_s += 0.0015
    assert case.remaining_s() == pytest.approx(0.0005)
    case.arrive()
    assert case.remaining_s() == pytest.approx(0.002)
    case.clock.now_s += 0.0021
    assert case.remaining_s() < 0


def test_the_window_lasts_at_most_twenty_milliseconds(case):
    for _ in range(19):
        case.clock.now_s += 0.001
        case.arrive()
    assert case.remaining_s() == pytest.approx(0.001)
    case.clock.now_s += 0.0011
    case.arrive()
    assert case.remaining_s() < 0
    case.arrive(is_first=True)
    assert case.remaining_s() == pytest.approx(0.002)


@pytest.mark.parametrize(("token_s", "gap_s"), [(0.0, 0.002), (0.005, 0.005), (3.0, 0.01)])
def test_the_gap_between_arrivals_follows_the_token_time_within_bounds(case, token_s, gap_s):
    case.window.decoded(token_s)
    assert case.remaining_s() == pytest.approx(gap_s)


def test_requests_that_are_being_stored_hold_the_window_open(case):
    with case.arrivals.pending(2):
        case.clock.now_s += 0.015
        assert case.remaining_s() == pytest.approx(0.002)
        case.clock.now_s += 0.004
        assert case.remaining_s() == pytest.approx(0.001)
        case.clock.now_s += 0.002
        assert case.remaining_s() < 0
    case.arrive(is_first=True)
    with case.arrivals.pending(1):
        case.clock.now_s += 0.015
    # It was refused.
    assert case.remaining_s() < 0


def test_a_request_queued_long_ago_opens_no_window(case):
    case.clock.now_s += 3
    case.window.open()
    assert case.remaining_s() < 0


def test_a_disabled_window_never_opens(case):
    window = BatchWindow(False, case.arrivals.since_last_arrival_s, case.clock)
    window.open()
    assert window.remaining_s() == 0


def test_arrivals_hold_the_window_open_while_the_first_plan_runs(case):
    case.window.sent(7)
    for step in range(8, 108):
        case.clock.now_s += 0.0015
        assert case.remaining_s() == pytest.approx(0.0005)
        case.arrive()
        case.window.sent(step)
    case.window.completed(7)
    assert case.remaining_s() == 0


def test_completion_of_earlier_plans_does_not_close_the_window(case):
    case.window.completed(3)
    assert case.remaining_s() == pytest.approx(0.002)
    case.window.sent(5)
    case.window.completed(4)
    assert case.remaining_s() == pytest.approx(0.002)
    case.window.completed(5)
    assert case.remaining_s() == 0
    case.window.completed(6)
    case.arrive(is_first=True)
    case.window.completed(6)
    assert case.remaining_s() == pytest.approx(0.002)
