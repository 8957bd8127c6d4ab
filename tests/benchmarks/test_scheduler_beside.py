"""The comparison of two commits' schedulers."""

from benchmarks.scheduler.beside import summary


def test_ratios_are_those_within_rounds() -> None:
    # The machine was half as fast in the second round.
    then = [{"cpu_p50_ms": ms, "cpu_ms": ms + 1} for ms in (2.0, 4.0, 2.2)]
    now = [{"cpu_p50_ms": ms, "cpu_ms": ms + 1} for ms in (1.0, 2.0, 1.0)]
    assert summary(then, now) == {
        "then_p50_ms": 2.2,
        "now_p50_ms": 1.0,
        "ratio": 2.0,
        "then_ms": 3.2,
        "now_ms": 2.0,
        "mean_ratio": 1.6,
    }
