import asyncio

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


async def test_the_start_of_the_process_is_no_suspension() -> None:
    """It may read the model's files for seconds before it serves."""
    now_s = 100.0
    suspension = Suspension(lambda: now_s)
    now_s += 5
    looking = asyncio.create_task(suspension.run())
    await asyncio.sleep(0)
    assert not suspension.has_just_ended()
    looking.cancel()
