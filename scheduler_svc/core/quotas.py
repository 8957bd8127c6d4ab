"""Limits of principals over all gateways: rates, live and resumable requests, queued tokens."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from quire.service.errors import RequestError
from scheduler_svc.core.limits import (
    COUNTS,
    MINUTE_S,
    RATES,
    Excess,
    LimitShares,
    PrincipalLimits,
    RateState,
    Reservation,
    TokenBucket,
    Usage,
    Usages,
    UsedRates,
)
from scheduler_svc.core.sequence import Group

# When a request will have ended is not known: this is how often a client may ask.
_RETRY_AFTER_S = 1.0
# Over how long the use of a rate is averaged, by which shards divide it.
_RATE_MEMORY_S = 5.0


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
    # Of counts, by requests that wait for room.
    wanted: dict[str, int] = field(default_factory=dict)

    def decay_rates(self, since_s: float) -> None:
        """Mix what was used in the last seconds into the rates."""
        weight = 1 - math.exp(-since_s / _RATE_MEMORY_S)
        per_minute = MINUTE_S / since_s
        self.requests_rate += weight * (self.num_new_requests * per_minute - self.requests_rate)
        self.tokens_rate += weight * (self.num_new_tokens * per_minute - self.tokens_rate)
        self.num_new_requests = self.num_new_tokens = 0

    def in_use(self, num_waiting_tokens: int) -> Usage:
        return Usage(
            requests_per_minute=max(0, round(self.requests_rate)),
            tokens_per_minute=max(0, round(self.tokens_rate)),
            live_requests=self.num_live,
            waiting_tokens=num_waiting_tokens + self.num_reserved_tokens,
            resumable_requests=self.num_resumable,
        )

    def lower_shares(self, claims: Mapping[str, int]) -> None:
        """Lower the shares of counts to what is claimed of them: 0 if nothing is."""
        lowered = {
            name: min(share, claims.get(name, 0))
            for name in COUNTS
            if (share := getattr(self.shares, name)) is not None
        }
        self.shares = replace(self.shares, **lowered)

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

    @property
    def has_others(self) -> bool:
        """Whether limits are divided among several shards."""
        return self._shares.has_others

    def set_limits(self, principal: str, limits: PrincipalLimits) -> None:
        usage = self._of(principal)
        if usage.limits != limits:
            usage.limits = limits
            self._set_shares(principal, usage)

    def _set_shares(self, principal: str, usage: _Usage) -> None:
        limits, shares = usage.limits, usage.shares
        rates = {name: self._shares.rate(principal, name, getattr(limits, name)) for name in RATES}
        counts = {
            name: None
            if (limit := getattr(limits, name)) is None
            else self._shares.granted(principal, name, limit, getattr(shares, name))
            for name in COUNTS
        }
        usage.shares = PrincipalLimits(**rates, **counts)
        if usage.shares.requests_per_minute != shares.requests_per_minute:
            usage.requests = self._bucket(usage.requests, usage.shares.requests_per_minute)
        if usage.shares.tokens_per_minute != shares.tokens_per_minute:
            usage.tokens = self._bucket(usage.tokens, usage.shares.tokens_per_minute)

    def report(
        self,
        since_s: float,
        num_waiting_tokens: Callable[[str], int],
        *,
        keeps_spare: bool = True,
    ) -> dict[str, Usage]:
        """What principals with limits use, and claim of them, `since_s` seconds after the last
        report. `num_waiting_tokens` returns those that a principal has in the queue. From now on
        this shard uses no more than it claims; that includes what it may use soon, if it
        `keeps_spare`."""
        report, now_s = {}, self.clock()
        for principal, usage in self._usage.items():
            usage.decay_rates(since_s)
            if usage.limits == _NO_LIMITS:
                continue
            used = usage.in_use(num_waiting_tokens(principal))
            is_active = used != _UNUSED or any(usage.wanted.values())
            claims = self._claim(principal, usage, used, keeps_spare) if is_active else {}
            usage.lower_shares(claims)
            if is_active:
                report[principal] = replace(
                    used,
                    **{f"claimed_{name}": count for name, count in claims.items()},
                    left_requests_per_minute=usage.requests.left(now_s) if usage.requests else 0,
                    left_tokens_per_minute=usage.tokens.left(now_s) if usage.tokens else 0,
                )
        return report

    def _claim(
        self, principal: str, usage: _Usage, used: Usage, keeps_spare: bool
    ) -> dict[str, int]:
        return {
            name: self._shares.claim(
                principal,
                name,
                limit,
                getattr(used, name),
                usage.wanted.get(name, 0),
                keeps_spare=keeps_spare,
            )
            for name in COUNTS
            if (limit := getattr(usage.limits, name)) is not None
        }

    def divide(self, shard: int, reports: Sequence[Usages]) -> None:
        """Take this shard's share of every limit, given the reports of all shards. At first it has
        claimed nothing."""
        had_others = self._shares.has_others
        self._shares.update(shard, reports)
        for principal, usage in self._usage.items():
            if not had_others:
                usage.shares = replace(usage.shares, **dict.fromkeys(COUNTS))
            self._set_shares(principal, usage)

    @contextlib.contextmanager
    def wanting(self, waiting: Sequence[Reservation]) -> Iterator[None]:
        """Claim room for requests that wait in all reports within the context."""
        self._want(waiting, 1)
        try:
            yield
        finally:
            self._want(waiting, -1)

    def _want(self, waiting: Sequence[Reservation], sign: int) -> None:
        for new in waiting:
            wanted = self._of(new.principal).wanted
            for name, amount in new.counts.items():
                wanted[name] = wanted.get(name, 0) + sign * amount

    def other_with_room(self, principal: str, excess: Excess) -> int | None:
        """Another shard that has room for a request that this one has no room for, if any does."""
        if not excess.is_divided:
            return None
        return self._shares.other_with(principal, excess.name, excess.limit, excess.amount)

    def excess(self, new: Reservation, num_waiting_tokens: int) -> Excess | None:
        """What a request exceeds, whose principal has `num_waiting_tokens` in the queue; None if it
        is within all of its shares."""
        usage = self._of(new.principal)
        limits, shares, now_s = usage.limits, usage.shares, self.clock()
        if usage.requests and (wait_s := usage.requests.wait_s(1, now_s)):
            return self._excess("requests_per_minute", limits.requests_per_minute, 1, wait_s)
        amount = new.num_prompt_tokens
        if usage.tokens and (wait_s := usage.tokens.wait_s(amount, now_s)):
            return self._excess("tokens_per_minute", limits.tokens_per_minute, amount, wait_s)
        num_waiting_tokens += usage.num_reserved_tokens
        used = {
            "live_requests": usage.num_live,
            "waiting_tokens": num_waiting_tokens,
            "resumable_requests": usage.num_resumable,
        }
        for name, amount in new.counts.items():
            limit, share = getattr(limits, name), getattr(shares, name)
            if name == "waiting_tokens" and limit is not None and not num_waiting_tokens:
                # One longer than the limit is accepted if no other waits, as by the whole queue.
                amount = min(amount, limit)
            if amount and share is not None and used[name] + amount > share:
                excess = self._excess(name, limit, amount)
                return excess if used[name] + amount <= limit else replace(excess, is_divided=False)
        return None

    def _excess(
        self, name: str, limit: int | None, amount: int, wait_s: float = _RETRY_AFTER_S
    ) -> Excess:
        return Excess(name, limit or 0, amount, wait_s, self._shares.has_others)

    def error(self, new: Reservation, num_waiting_tokens: int) -> RequestError | None:
        """The error of a request beyond a share; None if it is within all of them."""
        excess = self.excess(new, num_waiting_tokens)
        return None if excess is None else excess.error()

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

    def given(self, group: Group) -> None:
        """Count a live request less, with its part of the shares: another shard gets both."""
        self._count_live(group, -1)
        if self._shares.has_others:
            usage = self._of(group.key.principal)
            usage.shares = replace(
                usage.shares,
                live_requests=_less(usage.shares.live_requests, 1),
                resumable_requests=_less(
                    usage.shares.resumable_requests, int(bool(group.record.resume_window_s))
                ),
            )

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


def _less(share: int | None, amount: int) -> int | None:
    return None if share is None else max(0, share - amount)
