"""Limits of principals over all gateways: rates, live and resumable requests, queued tokens."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from grpc import StatusCode

from quire.service.errors import RequestError, failed
from scheduler_svc.core.limits import LimitShares, PrincipalLimits, Usage, Usages
from scheduler_svc.core.sequence import Group

_MINUTE_S = 60.0
_ROUNDING = 1e-6
# When a request will have ended is not known: this is how often a client may ask.
_RETRY_AFTER_S = 1.0
# Over how long the use of a rate is averaged, by which shards divide it.
_RATE_MEMORY_S = 5.0


@dataclass(slots=True)
class TokenBucket:
    """A rate limit that allows a minute's amount at once. Its level is negative after an overdraft:
    of outputs, whose lengths are not known before."""

    per_minute: int
    level: float
    updated_s: float

    def take(self, amount: float, now_s: float) -> None:
        """Take an amount that was used since the last call; a negative one is given back."""
        refilled = self.level + (now_s - self.updated_s) * self.per_minute / _MINUTE_S
        self.level = min(self.per_minute, refilled - amount)
        self.updated_s = now_s

    def wait_s(self, amount: float, now_s: float) -> float:
        """Seconds until an amount is available. A full bucket suffices for any amount."""
        self.take(0, now_s)
        missing = min(amount, self.per_minute) - self.level
        # A client that waits for as long as it was asked to is not refused for a rounding error.
        return missing * _MINUTE_S / self.per_minute if missing > _ROUNDING else 0.0

    @property
    def state(self) -> "RateState":
        """The bucket, independent of when it was last refilled."""
        missing = self.per_minute - self.level
        return RateState(self.per_minute, self.updated_s + missing * _MINUTE_S / self.per_minute)


@dataclass(frozen=True, slots=True)
class RateState:
    """A bucket by the time at which it is full if nothing is used until then."""

    per_minute: int
    full_at_s: float

    def bucket(self, now_s: float) -> TokenBucket:
        missing = (self.full_at_s - now_s) * self.per_minute / _MINUTE_S
        return TokenBucket(self.per_minute, self.per_minute - max(0.0, missing), now_s)


@dataclass(frozen=True, slots=True)
class UsedRates:
    """What a principal has used of its rates; None if nothing, or without a limit."""

    requests: RateState | None = None
    tokens: RateState | None = None


@dataclass(frozen=True, slots=True)
class Reservation:
    """What a new request uses until it is queued."""

    principal: str
    num_prompt_tokens: int
    is_resumable: bool


_NO_LIMITS = PrincipalLimits()
# Of a principal that is idle, which reports leave out.
_UNUSED = Usage()


@dataclass(slots=True)
class _Usage:
    limits: PrincipalLimits = field(default_factory=PrincipalLimits)
    # This shard's shares of the limits.
    shares: PrincipalLimits = field(default_factory=PrincipalLimits)
    requests: TokenBucket | None = None
    tokens: TokenBucket | None = None
    # Requests and their tokens, reserved ones included until they are queued.
    num_live: int = 0
    num_resumable: int = 0
    num_reserved_tokens: int = 0
    # Used of the rates since the last report, and per minute, decayed.
    num_new_requests: int = 0
    num_new_tokens: int = 0
    requests_rate: float = 0.0
    tokens_rate: float = 0.0

    def decay_rates(self, since_s: float) -> None:
        """Mix what was used in the last seconds into the rates."""
        weight = 1 - math.exp(-since_s / _RATE_MEMORY_S)
        per_minute = _MINUTE_S / since_s
        self.requests_rate += weight * (self.num_new_requests * per_minute - self.requests_rate)
        self.tokens_rate += weight * (self.num_new_tokens * per_minute - self.tokens_rate)
        self.num_new_requests = self.num_new_tokens = 0

    def used(self, bucket: TokenBucket | None, now_s: float) -> RateState | None:
        """The state of a bucket that has to be handed on; None if it is as good as a new one."""
        if bucket is None:
            return None
        state = bucket.state
        return state if state.full_at_s > now_s or self.num_live else None


class Quotas:
    """What principals use of their limits. Requests that were accepted before, by this leader or
    an earlier one, are counted as live and never refused."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._usage: dict[str, _Usage] = {}
        self._shares = LimitShares()

    def set_limits(self, principal: str, limits: PrincipalLimits) -> None:
        usage = self._of(principal)
        if usage.limits != limits:
            usage.limits = limits
            self._set_shares(principal, usage)

    def _set_shares(self, principal: str, usage: _Usage) -> None:
        shares = self._shares.of(principal, usage.limits)
        if usage.shares != shares:
            usage.shares = shares
            usage.requests = self._bucket(usage.requests, shares.requests_per_minute)
            usage.tokens = self._bucket(usage.tokens, shares.tokens_per_minute)

    def report(self, since_s: float, num_waiting_tokens: Callable[[str], int]) -> dict[str, Usage]:
        """What principals with limits use, `since_s` seconds after the last report.
        `num_waiting_tokens` returns those that a principal has in the queue."""
        report = {}
        for principal, usage in self._usage.items():
            usage.decay_rates(since_s)
            if usage.limits != _NO_LIMITS:
                waiting = num_waiting_tokens(principal) + usage.num_reserved_tokens
                used = Usage(
                    requests_per_minute=max(0, round(usage.requests_rate)),
                    tokens_per_minute=max(0, round(usage.tokens_rate)),
                    live_requests=usage.num_live,
                    waiting_tokens=waiting,
                    resumable_requests=usage.num_resumable,
                )
                if used != _UNUSED:
                    report[principal] = used
        return report

    def divide(self, shard: int, reports: Sequence[Usages]) -> None:
        """Take this shard's share of every limit, given the reports of all shards."""
        self._shares.update(shard, reports)
        for principal, usage in self._usage.items():
            self._set_shares(principal, usage)

    def error(self, new: Reservation, num_waiting_tokens: int) -> RequestError | None:
        """The error of a request beyond a limit of its principal, which has `num_waiting_tokens` in
        the queue; None if it is within all of them."""
        usage = self._of(new.principal)
        limits, shares, now_s = usage.limits, usage.shares, self.clock()
        if usage.requests and (wait_s := usage.requests.wait_s(1, now_s)):
            return _exceeded("requests_per_minute", limits.requests_per_minute, wait_s)
        if usage.tokens and (wait_s := usage.tokens.wait_s(new.num_prompt_tokens, now_s)):
            return _exceeded("tokens_per_minute", limits.tokens_per_minute, wait_s)
        if _is_beyond(usage.num_live + 1, shares.live_requests):
            return _exceeded("live_requests", limits.live_requests)
        num_waiting_tokens += usage.num_reserved_tokens
        # A request longer than the limit is accepted if no other one waits, as by the whole queue.
        if num_waiting_tokens and _is_beyond(
            num_waiting_tokens + new.num_prompt_tokens, shares.waiting_tokens
        ):
            return _exceeded("waiting_tokens", limits.waiting_tokens)
        if new.is_resumable and _is_beyond(usage.num_resumable + 1, shares.resumable_requests):
            return _exceeded("resumable_requests", limits.resumable_requests)
        return None

    def reserve(self, new: Reservation) -> None:
        """Count a new request, before it is recorded."""
        usage = self._of(new.principal)
        usage.num_live += 1
        usage.num_resumable += new.is_resumable
        usage.num_reserved_tokens += new.num_prompt_tokens
        self._take(usage, 1, new.num_prompt_tokens)

    def confirm(self, new: Reservation) -> None:
        """End the reservation of a request that is queued: it is counted as live from now on."""
        usage = self._of(new.principal)
        usage.num_live -= 1
        usage.num_resumable -= new.is_resumable
        usage.num_reserved_tokens -= new.num_prompt_tokens

    def cancel(self, new: Reservation) -> None:
        """End the reservation of a request that was not accepted, or had been before."""
        self.confirm(new)
        self._take(self._of(new.principal), -1, -new.num_prompt_tokens)

    def started(self, group: Group) -> None:
        """Count a live request."""
        self._count_live(group, 1)

    def ended(self, group: Group) -> None:
        self._count_live(group, -1)

    def count_output(self, num_tokens: Mapping[str, int]) -> None:
        """Take tokens of output from the rates of their principals."""
        for principal, count in num_tokens.items():
            self._take(self._of(principal), 0, count)

    def num_live(self, principal: str) -> int:
        """Live requests of a principal, as its limit counts them."""
        usage = self._usage.get(principal)
        return usage.num_live if usage else 0

    def export(self) -> dict[str, UsedRates]:
        """What principals have used of their rates. Full buckets are left out, unless output of
        live requests will be taken from them."""
        now_s = self.clock()
        used = {
            principal: UsedRates(usage.used(usage.requests, now_s), usage.used(usage.tokens, now_s))
            for principal, usage in self._usage.items()
        }
        return {principal: rates for principal, rates in used.items() if rates != UsedRates()}

    def restore(self, used: Mapping[str, UsedRates]) -> None:
        """Continue with the rates that another leader has counted, on this object's clock. Limits
        come with the next request."""
        now_s = self.clock()
        for principal, rates in used.items():
            usage = self._of(principal)
            limits = {}
            if rates.requests is not None:
                limits["requests_per_minute"] = rates.requests.per_minute
                usage.requests = rates.requests.bucket(now_s)
            if rates.tokens is not None:
                limits["tokens_per_minute"] = rates.tokens.per_minute
                usage.tokens = rates.tokens.bucket(now_s)
            usage.limits = usage.shares = PrincipalLimits(**limits)

    def _count_live(self, group: Group, change: int) -> None:
        usage = self._of(group.key.principal)
        usage.num_live += change
        if group.record.resume_window_s:
            usage.num_resumable += change

    def _take(self, usage: _Usage, num_requests: int, num_tokens: int) -> None:
        usage.num_new_requests += num_requests
        usage.num_new_tokens += num_tokens
        if usage.requests is not None:
            usage.requests.take(num_requests, self.clock())
        if usage.tokens is not None:
            usage.tokens.take(num_tokens, self.clock())

    def _bucket(self, bucket: TokenBucket | None, per_minute: int | None) -> TokenBucket | None:
        """A bucket of a new rate; full if there was none before."""
        if per_minute is None:
            return None
        now_s = self.clock()
        if bucket is None:
            return TokenBucket(per_minute, per_minute, now_s)
        bucket.take(0, now_s)
        return TokenBucket(per_minute, min(bucket.level, per_minute), now_s)

    def _of(self, principal: str) -> _Usage:
        usage = self._usage.get(principal)
        if usage is None:
            usage = self._usage[principal] = _Usage()
        return usage


def _is_beyond(count: int, limit: int | None) -> bool:
    return limit is not None and count > limit


def _exceeded(name: str, limit: int | None, wait_s: float = _RETRY_AFTER_S) -> RequestError:
    """`wait_s` is left out of the error of a limit of 0, under which no retry succeeds."""
    what = name.replace("_", " ")
    return failed(
        StatusCode.RESOURCE_EXHAUSTED,
        name.upper(),
        f"the limit of {limit} {what} of this API key's tenant is reached",
        wait_s if limit else None,
    )
