"""Tenants: the clients that share one set of keys, limits and a share of the service."""

from dataclasses import dataclass
from typing import Final

from quire.internal.v1 import scheduler_pb2

# The class of tenants without another one, and of requests without keys.
DEFAULT_CLASS: Final = "default"
# A regular expression.
TENANT_CLASS: Final = r"[a-z][a-z0-9_-]{0,31}"
# Begins the salt of a tenant's prefixes. No cache salt of a request has this byte: they are UTF-8.
_SALT_BYTE = b"\xff"


@dataclass(frozen=True)
class TenantLimits:
    """Limits of one tenant, over all gateways; None is no limit."""

    # Sustained rates; each may be used for a minute at once after a minute without use.
    requests_per_minute: int | None = None
    # Tokens of prompts and outputs.
    tokens_per_minute: int | None = None
    live_requests: int | None = None
    # Tokens of its queued requests.
    waiting_tokens: int | None = None
    # Live requests that continue without their clients.
    resumable_requests: int | None = None
    # Of one request: n x max_tokens.
    output_tokens: int | None = None
    # Of one request, in seconds.
    resume_window_s: int | None = None


@dataclass(frozen=True)
class PriorityRange:
    """Priorities that a tenant may request, both included."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first} to {self.last}"

    def __contains__(self, priority: int) -> bool:
        return self.first <= priority <= self.last

    @property
    def default(self) -> int:
        """The priority of a request without one: the value of the range that is nearest to 0."""
        return min(max(0, self.first), self.last)


@dataclass(frozen=True)
class Tenant:
    """A tenant, as the keys file describes it."""

    # Scopes request ids; empty without authentication.
    name: str = ""
    # Its share of the service relative to other tenants'.
    weight: float = 1.0
    # May use reflection.
    is_admin: bool = False
    # Its requests share cached prefixes with those of other such tenants.
    shares_prefixes: bool = False
    priorities: PriorityRange | None = None
    limits: TenantLimits = TenantLimits()
    # Tenants of a class share their latency objectives, and series of metrics.
    tenant_class: str = DEFAULT_CLASS

    @property
    def principal(self) -> str:
        """The owner of its request ids, as the scheduler knows it."""
        return self.name

    def cache_salt(self, request_salt: str) -> bytes:
        """The salt of a request's prefixes. Different tenants' are different, unless they share."""
        salt = request_salt.encode()
        if self.shares_prefixes:
            return salt
        return _SALT_BYTE + self.name.encode() + _SALT_BYTE + salt

    def policy(self) -> scheduler_pb2.TenantPolicy:
        """What the scheduler enforces."""
        limits = self.limits
        return scheduler_pb2.TenantPolicy(
            weight=self.weight,
            requests_per_minute=limits.requests_per_minute,
            tokens_per_minute=limits.tokens_per_minute,
            live_requests=limits.live_requests,
            waiting_tokens=limits.waiting_tokens,
            resumable_requests=limits.resumable_requests,
            tenant_class=self.tenant_class,
        )


# The only tenant of a gateway without a keys file.
ANONYMOUS = Tenant(shares_prefixes=True)
