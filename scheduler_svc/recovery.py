"""What one term hands to the next: read from Redis, or kept by the process that led before."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import structlog

from scheduler_svc.core.sequence import Group
from scheduler_svc.core.tenants import TenantsState
from scheduler_svc.engine.record_conversion import from_record, last_pools, ranges_of, to_record
from scheduler_svc.engine.tenant_writer import read_tenants
from scheduler_svc.store.store import Store

log = structlog.get_logger()


@dataclass(frozen=True)
class RecoveredState:
    """Live requests at the end of one term, with which the next one begins."""

    groups: list[Group] = field(default_factory=list)
    # The last known step of each pool, by incarnation.
    steps: Mapping[int, int] = field(default_factory=dict)
    tenants: TenantsState = field(default_factory=TenantsState)
    # The fingerprint of the model that their outputs are of; empty if unknown.
    model: bytes = b""


async def recover(store: Store) -> RecoveredState:
    """Recover another leader's requests from Redis: records, and the journals of the pools."""
    pools = await store.pools()
    journals = {pool: await store.pool(pool, num_blocks=0).journal() for pool in pools}
    ranges = ranges_of(entry for journal in journals.values() for entry in journal)
    groups = [from_record(stored, ranges) for stored in await store.load_live()]
    last_incarnations = last_pools(journals)
    for sequence in (other for group in groups for other in group.sequences):
        sequence.last_incarnation = last_incarnations.get(sequence.sequence_id)
    if groups:
        log.info("requests recovered", requests=len(groups))
    tenants = await read_tenants(store, time.monotonic())
    return RecoveredState(groups, dict.fromkeys(pools, 0), tenants, await store.model())


async def rewrite(store: Store, state: RecoveredState) -> RecoveredState:
    """Overwrite the records in Redis, which lost writes, with this scheduler's state."""
    await store.replace_live([to_record(group) for group in state.groups])
    for group in state.groups:
        for sequence in group.sequences:
            sequence.num_recorded = sequence.num_journaled
    if state.model:
        await store.write_model(state.model)
    pools = await store.pools()
    steps = {pool: state.steps.get(pool, 0) for pool in pools}
    return RecoveredState(state.groups, steps, state.tenants, state.model)
