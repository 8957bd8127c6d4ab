from gateway_svc.scheduler.suspension import Suspension


def test_a_suspension_has_just_ended_for_two_seconds() -> None:
    now_s = 100.0
    suspension = Suspension(lambda: now_s)
    assert not suspension.has_just_ended()
    for _ in range(8):
        now_s += 0.4
        assert not suspension.has_just_ended()
    now_s += 1.6
    assert suspension.has_just_ended()
    now_s += 0.9
    assert suspension.has_just_ended()
    for _ in range(3):
        now_s += 0.9
        suspension.has_just_ended()
    assert not suspension.has_just_ended()
