"""When a client retries, and when it gives up."""

import grpc
import pytest

from quire.client.errors import QuireError
from quire.client.retry_policy import RetryPolicy
from quire.client.targets import Targets

_TIMEOUT_S = 30.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def policy(clock: Clock) -> RetryPolicy:
    return RetryPolicy(Targets("a:1,b:2"), _TIMEOUT_S, clock=clock)


def failure(reason: str | None = None) -> QuireError:
    return QuireError(grpc.StatusCode.UNAVAILABLE, "away", reason=reason, resumable=True)


def gives_up_after(
    policy: RetryPolicy, clock: Clock, attempt_s: float, error: QuireError, most: int = 20
) -> float | None:
    """Seconds until the error is raised, if each attempt fails after so long; None if it is not."""
    began_s = clock.now_s
    for _ in range(most):
        policy.begin_attempt()
        clock.now_s += attempt_s
        try:
            clock.now_s += policy.backoff_s(error)
        except QuireError:
            return clock.now_s - began_s
    return None


def test_it_gives_up_when_connections_have_failed_for_the_timeout(
    policy: RetryPolicy, clock: Clock
) -> None:
    seconds = gives_up_after(policy, clock, 0.5, failure(), most=1000)
    assert seconds is not None
    assert _TIMEOUT_S <= seconds < _TIMEOUT_S + 3


def test_long_attempts_that_break_had_reached_a_server(policy: RetryPolicy, clock: Clock) -> None:
    """A request may wait for a worker longer than the timeout."""
    assert gives_up_after(policy, clock, 2 * _TIMEOUT_S, failure(), most=6) is None


def test_it_gives_up_on_a_proxy_that_breaks_each_attempt_before_its_response(
    policy: RetryPolicy, clock: Clock
) -> None:
    seconds = gives_up_after(policy, clock, 2 * _TIMEOUT_S, failure())
    assert seconds is not None
    assert 14 * _TIMEOUT_S <= seconds < 14 * _TIMEOUT_S + 10


def test_progress_permits_further_attempts_that_break_late(
    policy: RetryPolicy, clock: Clock
) -> None:
    for _ in range(3):
        assert gives_up_after(policy, clock, 2 * _TIMEOUT_S, failure(), most=6) is None
        policy.begin_attempt()
        policy.record_progress()


def test_it_gives_up_on_gateways_that_wait_for_a_scheduler_in_vain(
    policy: RetryPolicy, clock: Clock
) -> None:
    seconds = gives_up_after(policy, clock, 30.0, failure("SCHEDULER_AWAY"))
    assert seconds is not None
    assert seconds < 2 * _TIMEOUT_S + 3


def test_progress_begins_the_time_anew(policy: RetryPolicy, clock: Clock) -> None:
    for _ in range(5):
        assert gives_up_after(policy, clock, 20.0, failure("SCHEDULER_AWAY"), most=2) is None
        policy.record_progress()
    assert gives_up_after(policy, clock, 20.0, failure("SCHEDULER_AWAY"), most=3) is not None


def test_a_long_attempt_that_breaks_begins_the_time_anew(policy: RetryPolicy, clock: Clock) -> None:
    for reason in ("SCHEDULER_AWAY", None, "SCHEDULER_AWAY", None, "SCHEDULER_AWAY"):
        assert gives_up_after(policy, clock, 20.0, failure(reason), most=1) is None
    assert gives_up_after(policy, clock, 20.0, failure("SCHEDULER_AWAY"), most=1) is not None


def test_the_wait_for_room_among_other_calls_is_no_failure(
    policy: RetryPolicy, clock: Clock
) -> None:
    for _ in range(5):
        # The retry is due after its delay, and begins later.
        assert gives_up_after(policy, clock, 0.5, failure(), most=1) is None
        clock.now_s += 2 * _TIMEOUT_S
    seconds = gives_up_after(policy, clock, 0.5, failure(), most=1000)
    assert seconds is not None
    assert _TIMEOUT_S - 10 <= seconds < _TIMEOUT_S + 3


def test_a_first_attempt_is_sent_to_the_gateway_that_served_last(clock: Clock) -> None:
    """Calls of a batch are planned together, and begin one after another."""
    targets = Targets("a:1,b:2")
    first, second, third = (RetryPolicy(targets, _TIMEOUT_S, clock=clock) for _ in range(3))
    for policy in (first, second):
        policy.begin_attempt()
        policy.backoff_s(failure())
    first.begin_attempt()
    first.record_progress()
    third.begin_attempt()
    assert (first.target, third.target) == ("b:2", "b:2")
    # A retry is sent to the gateway after the one that failed, whatever others have found.
    targets.current = "a:1"
    second.begin_attempt()
    assert second.target == "b:2"
