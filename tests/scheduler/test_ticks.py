"""Periodic work of a process ends its sleep at common moments."""

import pytest

from scheduler_svc.ticks import until_tick

_TICK_S = 0.25


@pytest.mark.parametrize("begin_ms", range(0, 500, 7))
@pytest.mark.parametrize("interval_s", [0.25, 1 / 3, 0.5, 1.0, 2.0])
def test_all_wake_up_at_multiples_of_a_tick(interval_s: float, begin_ms: int) -> None:
    begin_s = 1000 + begin_ms / 1000
    first_s = 1000 + until_tick(_TICK_S, 1000.0)
    delay_s = until_tick(interval_s, begin_s)
    num_ticks = (begin_s + delay_s - first_s) / _TICK_S
    assert num_ticks == pytest.approx(round(num_ticks), abs=1e-6)
    assert max(0, interval_s - _TICK_S) < delay_s <= interval_s


def test_from_tick_to_tick_is_the_interval() -> None:
    at_s = 1000 + until_tick(_TICK_S, 1000.0)
    assert until_tick(_TICK_S, at_s) == pytest.approx(_TICK_S)
    assert until_tick(1.0, at_s) == pytest.approx(1.0)


def test_intervals_below_a_tick_are_exact() -> None:
    assert until_tick(0.02, 1000.1) == 0.02
