"""Limits of a principal, and how shards divide them by what each has used. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields


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


# By principal.
Usages = Mapping[str, Usage]

_RATES = ("requests_per_minute", "tokens_per_minute")
_NONE = Usage()


class LimitShares:
    """The shares of one shard, from the last report of every shard."""

    def __init__(self) -> None:
        self._shard = 0
        self._reports: Sequence[Usages] = ({},)

    @property
    def has_others(self) -> bool:
        """Whether there are other shards, so that a share is less than a limit."""
        return len(self._reports) > 1

    def update(self, shard: int, reports: Sequence[Usages]) -> None:
        """Use these reports, one for each shard; `shard` is this one."""
        self._shard, self._reports = shard, reports

    def of(self, principal: str, limits: PrincipalLimits) -> PrincipalLimits:
        """What this shard may allow. The shares of all shards add up to the limit; of a rate, each
        is at least one per minute."""
        if not self.has_others:
            return limits
        used = [report.get(principal, _NONE) for report in self._reports]
        return PrincipalLimits(
            **{x.name: self._share(x.name, limits, used) for x in fields(limits)}
        )

    def _share(self, name: str, limits: PrincipalLimits, used: Sequence[Usage]) -> int | None:
        limit: int | None = getattr(limits, name)
        if limit is None:
            return None
        of_shards = [getattr(one, name) for one in used]
        if name not in _RATES:
            return share_of(limit, of_shards, self._shard)
        return max(rate_share_of(limit, of_shards, self._shard), min(limit, 1))


def share_of(limit: int, used: Sequence[int], shard: int) -> int:
    """A shard's share of a limit: what it uses, and an equal part of what none uses. The first
    shards get what is left over. If more is used than the limit, shards keep what they use."""
    spare, surplus = divmod(max(0, limit - sum(used)), len(used))
    return used[shard] + spare + (shard < surplus)


def rate_share_of(limit: int, used: Sequence[int], shard: int) -> int:
    """A shard's share of a rate. If more is used than the limit, as by a burst after a pause, the
    shards divide the limit in proportion: if they kept what they use, they would use it ever after.
    """
    total = sum(used)
    return share_of(limit, used, shard) if total <= limit else limit * used[shard] // total
