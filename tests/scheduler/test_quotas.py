"""Limits of principals, with a clock that the tests move."""

from dataclasses import dataclass

import pytest
from google.rpc import error_details_pb2

from quire.service.errors import RequestError
from scheduler_svc.core.limits import PrincipalLimits, Reservation
from scheduler_svc.core.quotas import Quotas


@dataclass
class Clock:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


def quotas(clock: Clock | None = None, **limits: int) -> Quotas:
    made = Quotas(clock or Clock())
    made.set_limits("a", PrincipalLimits(**limits))
    return made


def request(num_tokens: int = 10, is_resumable: bool = False, principal: str = "a") -> Reservation:
    return Reservation(principal, num_tokens, is_resumable)


def reason(error: RequestError | None) -> str | None:
    if error is None:
        return None
    [info] = [one for one in error.details if isinstance(one, error_details_pb2.ErrorInfo)]
    return info.reason


def retry_s(error: RequestError | None) -> float | None:
    assert error is not None
    delays = [one for one in error.details if isinstance(one, error_details_pb2.RetryInfo)]
    return delays[0].retry_delay.ToNanoseconds() / 1e9 if delays else None


def accept(made: Quotas, new: Reservation) -> bool:
    if made.error(new, 0) is not None:
        return False
    made.reserve(new)
    return True


def test_requests_per_minute_are_refilled_evenly():
    clock = Clock()
    made = quotas(clock, requests_per_minute=6)
    assert [accept(made, request()) for _ in range(7)] == [True] * 6 + [False]
    error = made.error(request(), 0)
    assert (reason(error), retry_s(error)) == ("REQUESTS_PER_MINUTE", pytest.approx(10))
    clock.now_s += retry_s(error)
    assert [accept(made, request()) for _ in range(2)] == [True, False]
    clock.now_s += 3600
    assert sum(accept(made, request()) for _ in range(20)) == 6


def test_tokens_per_minute_count_prompts_and_outputs():
    clock = Clock()
    made = quotas(clock, tokens_per_minute=600)
    assert accept(made, request(400))
    made.count_output({"a": 500})
    # An overdraft of 300 tokens, and 100 for the prompt.
    error = made.error(request(100), 0)
    assert (reason(error), retry_s(error)) == ("TOKENS_PER_MINUTE", pytest.approx(40))
    clock.now_s += 40
    assert accept(made, request(100))


def test_a_prompt_above_the_rate_is_accepted_by_a_full_bucket():
    clock = Clock()
    made = quotas(clock, tokens_per_minute=100)
    assert accept(made, request(1000))
    assert not accept(made, request(1))
    clock.now_s += 60 * 9 + 1
    assert accept(made, request(1))


@pytest.mark.parametrize(
    ("limits", "num_accepted", "name"),
    [
        ({"live_requests": 3}, 3, "LIVE_REQUESTS"),
        ({"resumable_requests": 2}, 2, "RESUMABLE_REQUESTS"),
        ({"waiting_tokens": 45}, 4, "WAITING_TOKENS"),
    ],
)
def test_counts_are_limited_with_a_time_to_retry(limits, num_accepted, name):
    made = quotas(**limits)
    accepted = [accept(made, request(10, is_resumable=True)) for _ in range(6)]
    assert sum(accepted) == num_accepted
    error = made.error(request(10, is_resumable=True), 0)
    assert (reason(error), retry_s(error)) == (name, 1)
    made.cancel(request(10, is_resumable=True))
    assert made.error(request(10, is_resumable=True), 0) is None


def test_requests_without_a_window_are_not_resumable():
    made = quotas(resumable_requests=0)
    assert accept(made, request())
    # No retry succeeds.
    assert retry_s(made.error(request(is_resumable=True), 0)) is None


def test_queued_tokens_are_counted_with_reserved_ones():
    made = quotas(waiting_tokens=50)
    assert made.error(request(10), num_waiting_tokens=40) is None
    made.reserve(request(10))
    assert reason(made.error(request(10), num_waiting_tokens=40)) == "WAITING_TOKENS"
    # A longer one is accepted if nothing else waits.
    assert quotas(waiting_tokens=50).error(request(100), 0) is None


def test_a_cancelled_reservation_gives_its_rates_back():
    made = quotas(requests_per_minute=1, tokens_per_minute=10)
    for _ in range(3):
        assert accept(made, request(10))
        made.cancel(request(10))
    assert accept(made, request(10))
    made.confirm(request(10))
    assert not accept(made, request(10))


def test_principals_have_their_own_limits():
    made = quotas(live_requests=1)
    assert accept(made, request())
    assert not accept(made, request())
    assert all(accept(made, request(principal="b")) for _ in range(3))


def test_new_limits_apply_at_once_and_keep_what_was_used():
    made = quotas(requests_per_minute=10)
    assert sum(accept(made, request()) for _ in range(20)) == 10
    made.set_limits("a", PrincipalLimits(requests_per_minute=20))
    assert not accept(made, request())
    made.set_limits("a", PrincipalLimits(live_requests=11))
    assert [accept(made, request()) for _ in range(2)] == [True, False]
