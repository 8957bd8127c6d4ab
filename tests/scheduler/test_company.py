"""How long an idle lane waits for more requests."""

import pytest

from scheduler_svc.lanes.company import Company


class Clock:
    now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_the_next_one_has_two_milliseconds(clock):
    company = Company(is_awaited=True, clock=clock)
    clock.now_s += 10
    assert company.left_s() < 0
    company.somebody_came(is_first=True)
    assert company.left_s() == pytest.approx(0.002)
    clock.now_s += 0.0015
    assert company.left_s() == pytest.approx(0.0005)
    company.somebody_came(is_first=False)
    assert company.left_s() == pytest.approx(0.002)
    clock.now_s += 0.0021
    assert company.left_s() < 0


def test_all_of_them_have_twenty(clock):
    company = Company(is_awaited=True, clock=clock)
    company.somebody_came(is_first=True)
    for _ in range(19):
        clock.now_s += 0.001
        company.somebody_came(is_first=False)
    assert company.left_s() == pytest.approx(0.001)
    clock.now_s += 0.0011
    company.somebody_came(is_first=False)
    assert company.left_s() < 0
    company.somebody_came(is_first=True)
    assert company.left_s() == pytest.approx(0.002)


def test_nobody_is_awaited_where_that_is_switched_off(clock):
    company = Company(is_awaited=False, clock=clock)
    company.somebody_came(is_first=True)
    assert company.left_s() == 0
