"""What one leader hands to the next about tenants: their shares, and the rates that they used."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from scheduler_svc.core.fairness import FairShares, ShareState
from scheduler_svc.core.limits import UsedRates
from scheduler_svc.core.quotas import Quotas
from scheduler_svc.core.sequence import Sequence


@dataclass(frozen=True)
class TenantsState:
    """Principals that are absent are as good as new ones."""

    shares: Mapping[str, ShareState] = field(default_factory=dict)
    # One of `shares`; None if nothing was dispatched.
    last_served: str | None = None
    rates: Mapping[str, UsedRates] = field(default_factory=dict)


def export_tenants(
    shares: FairShares, quotas: Quotas, charged_again: Iterable[Sequence]
) -> TenantsState:
    """Export what differs from a new tenant. `charged_again`: see `FairShares.export`.

    A share matters while its principal has live requests, or if its counter is above the least to
    which a new one would be lifted.
    """
    exported = shares.export(charged_again)
    active = {name for name in exported if quotas.num_live(name) or name == shares.last_served}
    least = min((exported[name].counter for name in active), default=0.0)
    kept = {
        name: state for name, state in exported.items() if name in active or state.counter > least
    }
    return TenantsState(kept, shares.last_served, quotas.export())


def restore_tenants(state: TenantsState, shares: FairShares, quotas: Quotas) -> None:
    """Continue with the state of another leader. Its live requests are queued already."""
    shares.restore(state.shares, state.last_served)
    quotas.restore(state.rates)
