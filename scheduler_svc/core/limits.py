"""Limits of a principal, the buckets of its rates, and how shards divide limits by what each has
used. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Self

from grpc import StatusCode

from quire.service.errors import RequestError, failed


@dataclass(frozen=True, slots=True)
class PrincipalLimits:
    """None is no limit."""

    requests_per_minute: int | None = None
    # Of prompts and outputs.
    tokens_per_minute: int | None = None
    live_requests: int | None = None
    # Of queued requests.
    waiting_tokens: int | None = None
    # Live requests that continue without their clients.
    resumable_requests: int | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """What one shard has of a principal. The names of limits are those of `PrincipalLimits`."""

    # Per minute, by the last seconds.
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    live_requests: int = 0
    waiting_tokens: int = 0
    resumable_requests: int = 0
    # The service that its counter has charged in this shard.
    served: float = 0.0
    # How much of each count the shard claims. Until it reports less, others do not use that.
    claimed_live_requests: int = 0
    claimed_waiting_tokens: int = 0
    claimed_resumable_requests: int = 0
    # What is left in its buckets.
    left_requests_per_minute: int = 0
    left_tokens_per_minute: int = 0

    @classmethod
    def parse(cls, values: Sequence[float]) -> Self:
        """From the values of all fields in their order. ValueError for anything else."""
        if len(values) != len(fields(cls)) or not all(map(_is_number, values)):
            raise ValueError(f"{values!r} is no usage")
        return cls(*values)  # type: ignore[arg-type]


# By principal.
Usages = Mapping[str, Usage]

RATES = ("requests_per_minute", "tokens_per_minute")
COUNTS = ("live_requests", "waiting_tokens", "resumable_requests")
_NONE = Usage()
MINUTE_S = 60.0
# A request that is sent to another shard is in one of its next reports.
_SENT_REPORTS = 5
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class Reservation:
    """What a new request uses until it is queued."""

    principal: str
    num_prompt_tokens: int
    is_resumable: bool

    @property
    def counts(self) -> dict[str, int]:
        """What it adds to each count."""
        return {
            "live_requests": 1,
            "waiting_tokens": self.num_prompt_tokens,
            "resumable_requests": int(self.is_resumable),
        }


@dataclass(frozen=True, slots=True)
class Excess:
    """The limit that a new request exceeds, or this shard's share of it."""

    name: str
    limit: int
    # What the request needs of it.
    amount: int
    wait_s: float
    # Other shards have some of the limit: this one may get more, or another one may have room.
    is_divided: bool

    def error(self, shard: int | None = None) -> RequestError:
        """`shard` may have room for the request. The time to retry is left out of the error of a
        limit of 0, under which no retry succeeds."""
        return failed(
            StatusCode.RESOURCE_EXHAUSTED,
            self.name.upper(),
            f"the limit of {self.limit} {self.name.replace('_', ' ')} of this API key's tenant is "
            "reached",
            self.wait_s if self.limit else None,
            {} if shard is None else {"shard": str(shard)},
        )


@dataclass(slots=True)
class TokenBucket:
    """A rate limit that allows a minute's amount at once. Its level is negative after an overdraft:
    of outputs, whose lengths are not known before."""

    per_minute: int
    level: float
    updated_s: float

    def take(self, amount: float, now_s: float) -> None:
        """Take an amount that was used since the last call; a negative one is given back."""
        refilled = self.level + (now_s - self.updated_s) * self.per_minute / MINUTE_S
        self.level = min(self.per_minute, refilled - amount)
        self.updated_s = now_s

    def wait_s(self, amount: float, now_s: float) -> float:
        """Seconds until an amount is available. A full bucket suffices for any amount."""
        self.take(0, now_s)
        missing = min(amount, self.per_minute) - self.level
        # A client that waits for as long as it was asked to is not refused for a rounding error.
        return missing * MINUTE_S / self.per_minute if missing > _ROUNDING else 0.0

    def left(self, now_s: float) -> int:
        """What is available now."""
        self.take(0, now_s)
        return max(0, int(self.level))

    @property
    def state(self) -> "RateState":
        """The bucket, independent of when it was last refilled."""
        missing = self.per_minute - self.level
        return RateState(self.per_minute, self.updated_s + missing * MINUTE_S / self.per_minute)


@dataclass(frozen=True, slots=True)
class RateState:
    """A bucket by the time at which it is full if nothing is used until then."""

    per_minute: int
    full_at_s: float

    def bucket(self, now_s: float) -> TokenBucket:
        missing = (self.full_at_s - now_s) * self.per_minute / MINUTE_S
        return TokenBucket(self.per_minute, self.per_minute - max(0.0, missing), now_s)


@dataclass(frozen=True, slots=True)
class UsedRates:
    """What a principal has used of its rates; None if nothing, or without a limit."""

    requests: RateState | None = None
    tokens: RateState | None = None


class LimitShares:
    """The shares of one shard, from the last report of every shard.

    Of a rate, a share follows from what all use. Of a count, it is what the shard claims, as far as
    others do not claim it: since a claim is reported before it is used, and reduced before that is
    reported, the shares of all shards never add up to more than the limit.
    """

    def __init__(self) -> None:
        self._shard = 0
        self._reports: Sequence[Usages] = ({},)
        # By shard, principal and limit: what requests need that were sent there, and for how many
        # more reports that counts. They are on the way until the shard's report has changed.
        self._sent: dict[tuple[int, str, str], tuple[int, int]] = {}

    @property
    def has_others(self) -> bool:
        """Whether there are other shards, so that a share is less than a limit."""
        return len(self._reports) > 1

    def update(self, shard: int, reports: Sequence[Usages]) -> None:
        """Use these reports, one for each shard; `shard` is this one."""
        previous = self._reports
        self._shard, self._reports = shard, reports
        self._sent = {
            (other, principal, name): (amount, num_left - 1)
            for (other, principal, name), (amount, num_left) in self._sent.items()
            if num_left > 1
            and other < min(len(previous), len(reports))
            and reports[other].get(principal) == previous[other].get(principal)
        }

    def rate(self, principal: str, name: str, limit: int | None) -> int | None:
        """This shard's share of a rate: at least one per minute."""
        if limit is None or not self.has_others:
            return limit
        return self._rate_of(self._shard, principal, name, limit)

    def claim(
        self, principal: str, name: str, limit: int, used: int, wanted: int, *, keeps_spare: bool
    ) -> int:
        """What this shard claims of a count: what it uses, what it wants or, if others want more
        than is left, its part of that. `keeps_spare`: at least an equal part of what is left."""
        if not self.has_others:
            return limit
        used_by, claimed = self._used(principal, name), self._used(principal, f"claimed_{name}")
        used_by[self._shard] = used
        left = max(0, limit - sum(used_by))
        wants = [max(0, claim - held) for claim, held in zip(claimed, used_by, strict=True)]
        wants[self._shard] = wanted
        share = parts_of(left, wants)[self._shard]
        if keeps_spare:
            num_others = sum(principal in x for x in self._reports) - (
                principal in self._reports[self._shard]
            )
            # One part is left for a shard that does not have requests of this principal yet.
            share = max(share, left // (num_others + 2))
        return min(max(used, limit), used + share)

    def granted(self, principal: str, name: str, limit: int, held: int | None) -> int:
        """This shard's share of a count after its claim is reported; `held`: that before."""
        if not self.has_others:
            return limit
        return min(limit, max(self._granted(self._shard, principal, name, limit), held or 0))

    def other_with(self, principal: str, name: str, limit: int, amount: int) -> int | None:
        """The other shard that has the most of a limit left, if that is as much as this."""
        left, shard = max(
            (
                (self._left(shard, principal, name, limit), -shard)
                for shard in range(len(self._reports))
                if shard != self._shard
            ),
            default=(0, 0),
        )
        if left < amount:
            return None
        num_sent = self._num_sent(-shard, principal, name)
        self._sent[-shard, principal, name] = num_sent + amount, _SENT_REPORTS
        return -shard

    def _num_sent(self, shard: int, principal: str, name: str) -> int:
        return self._sent.get((shard, principal, name), (0, 0))[0]

    def _left(self, shard: int, principal: str, name: str, limit: int) -> int:
        sent = self._num_sent(shard, principal, name)
        known = self._reports[shard].get(principal)
        if name in RATES:
            left = (
                self._rate_of(shard, principal, name, limit)
                if known is None
                else getattr(known, f"left_{name}")
            )
        else:
            left = self._granted(shard, principal, name, limit) - getattr(known or _NONE, name)
        return int(left) - sent

    def _rate_of(self, shard: int, principal: str, name: str, limit: int) -> int:
        used = self._used(principal, name)
        return max(rate_share_of(limit, used, shard), min(limit, 1))

    def _granted(self, shard: int, principal: str, name: str, limit: int) -> int:
        claims = self._used(principal, f"claimed_{name}")
        return max(0, min(claims[shard], limit - sum(claims) + claims[shard]))

    def _used(self, principal: str, name: str) -> list[int]:
        """This field of all reports."""
        return [int(getattr(report.get(principal, _NONE), name)) for report in self._reports]


def share_of(limit: int, used: Sequence[int], shard: int) -> int:
    """A shard's share of a limit: what it uses, and an equal part of what none uses. The first
    shards get what is left over. If more is used than the limit, shards keep what they use."""
    spare, surplus = divmod(max(0, limit - sum(used)), len(used))
    return used[shard] + spare + (shard < surplus)


def parts_of(amount: int, wanted: Sequence[int]) -> list[int]:
    """Divide an amount in proportion to what is wanted of it. The first get what is left over by
    rounding."""
    total = sum(wanted)
    if total <= amount:
        return list(wanted)
    parts = [amount * one // total for one in wanted]
    for index, one in enumerate(wanted):
        if sum(parts) < amount and parts[index] < one:
            parts[index] += 1
    return parts


def rate_share_of(limit: int, used: Sequence[int], shard: int) -> int:
    """A shard's share of a rate. If more is used than the limit, as by a burst after a pause, the
    shards divide the limit in proportion: if they kept what they use, they would use it ever after.
    """
    total = sum(used)
    return share_of(limit, used, shard) if total <= limit else limit * used[shard] // total


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
