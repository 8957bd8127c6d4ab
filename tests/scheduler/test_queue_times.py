"""Queue times are counted by the class that a tenant's gateway sent last."""

from scheduler_svc.core.queue_times import QueueTimes


def test_a_wait_is_counted_under_the_class_of_its_tenant() -> None:
    now_s = 10.0
    times = QueueTimes(clock=lambda: now_s)
    times.set_class("a", "fast")
    times.set_class("b", "")
    timers = [times.start(principal) for principal in ("a", "b", "")]
    # Requests that wait keep the class that they came with.
    times.set_class("a", "slow")
    timers.append(times.start("a"))
    now_s += 3
    for timer in timers:
        timer.stop()
    counts = {name: list(found.buckets())[-1][1] for name, found in times.by_class.items()}
    assert counts == {"fast": 1, "default": 2, "slow": 1}
    assert times.by_class["fast"].sum == 3
    assert [count for bound, count in times.by_class["default"].buckets() if bound in (2.5, 5)] == [
        *(0, 2),
    ]
