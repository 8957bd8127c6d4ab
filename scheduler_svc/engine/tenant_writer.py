"""Stores what the next leader has to know of the tenants, once a second if it has changed."""

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import structlog

from scheduler_svc.core.fairness import ShareState
from scheduler_svc.core.limits import RateState, UsedRates
from scheduler_svc.core.tenants import TenantsState
from scheduler_svc.engine.engine import Engine
from scheduler_svc.store.errors import StoreUnavailable
from scheduler_svc.store.store import Store
from scheduler_svc.ticks import sleep_ticks

log = structlog.get_logger()

WRITE_INTERVAL_S = 1.0


class TenantWriter:
    """Writes the state of the tenants during one term. Without API keys it writes nothing."""

    def __init__(self, engine: Engine, store: Store) -> None:
        self._engine = engine
        self._store = store
        # None before the first write: what is stored may be missing or another leader's.
        self._written: TenantsState | None = None

    async def run(self) -> None:
        """Write until cancelled. A failed write is made up for by the next one."""
        while True:
            await sleep_ticks(WRITE_INTERVAL_S)
            with suppress(StoreUnavailable):
                await self.write()

    async def write(self) -> None:
        """Count output in time for the rates, and write the state if it has changed."""
        if not self._engine.shares.has_tenants:
            return
        state = self._engine.export_tenants()
        if state != self._written:
            await self._store.write_tenants(to_json(state, self._engine.quotas.clock()))
            self._written = state


async def read_tenants(store: Store, now_s: float) -> TenantsState:
    """Read what the last leader has stored; an empty state if there is none. `now_s`: the time on
    the clock of the quotas."""
    stored, age_s = await store.tenants()
    try:
        return from_json(stored, now_s - age_s) if stored else TenantsState()
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        log.warning("state of the tenants not read", reason=repr(error))
        return TenantsState()


def to_json(state: TenantsState, now_s: float) -> bytes:
    """Format with times relative to `now_s`; empty for an empty state."""
    if state == TenantsState():
        return b""
    return json.dumps(
        {
            "last_served": state.last_served,
            "shares": {
                name: {"weight": share.weight, "counter": share.counter}
                for name, share in state.shares.items()
            },
            "rates": {
                name: {
                    "requests": _rate_to_json(rates.requests, now_s),
                    "tokens": _rate_to_json(rates.tokens, now_s),
                }
                for name, rates in state.rates.items()
            },
        }
    ).encode()


def from_json(text: bytes, written_s: float) -> TenantsState:
    """Parse what `to_json` formatted at the time `written_s`. Any built-in error if malformed."""
    parsed = json.loads(text)
    shares = {
        name: ShareState(float(share["weight"]), float(share["counter"]))
        for name, share in parsed["shares"].items()
    }
    last_served = parsed["last_served"]
    if last_served is not None and last_served not in shares:
        raise KeyError(last_served)
    if not all(share.weight > 0 for share in shares.values()):
        raise ValueError("a weight is not positive")
    rates = {
        name: UsedRates(
            _rate_from_json(used["requests"], written_s), _rate_from_json(used["tokens"], written_s)
        )
        for name, used in parsed["rates"].items()
    }
    return TenantsState(shares, last_served, rates)


def _rate_to_json(state: RateState | None, now_s: float) -> dict[str, float] | None:
    if state is None:
        return None
    return {"per_minute": state.per_minute, "full_in_s": state.full_at_s - now_s}


def _rate_from_json(parsed: Mapping[str, Any] | None, written_s: float) -> RateState | None:
    if parsed is None:
        return None
    if (per_minute := int(parsed["per_minute"])) < 1:
        raise ValueError("a rate is not positive")
    return RateState(per_minute, written_s + float(parsed["full_in_s"]))
