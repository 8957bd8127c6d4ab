"""The JSON of `quire status`. Its keys are those of operations.proto, and rates in seconds."""

from collections.abc import Mapping
from typing import Any, Final

from quire.cli.status.status_report import Change, changes_of
from quire.client.decode_counts import DecodeCounts
from quire.client.operations import ClusterStatus
from quire.internal.v1.operations_pb2 import GetStatusResponse, WorkerStatus

# The incarnation has too many digits for a number in JSON; a map is no text.
_OMITTED: Final = {"incarnation", "block_map"}


def cluster_status_json(now: ClusterStatus, before: ClusterStatus | None) -> dict[str, Any]:
    """The status of all shards: of a single one its own, of several their sums, with the shard of
    each worker, and each shard's term."""
    previous = {} if before is None else before.statuses
    each = {shard: status_json(one, previous.get(shard)) for shard, one in now.statuses.items()}
    if now.num_shards == 1:
        return each[0]
    rates = [one["tokens_per_s"] for one in each.values() if one["tokens_per_s"] is not None]
    return {
        "shards": [_shard(shard, each.get(shard), now) for shard in range(now.num_shards)],
        "queue": {
            name: sum(one["queue"][name] for one in each.values())
            for name in ("num_requests", "num_tokens")
        },
        "num_accepted": sum(one["num_accepted"] for one in each.values()),
        "num_refused": sum(one["num_refused"] for one in each.values()),
        "tokens_per_s": sum(rates) if rates else None,
        "workers": _with_shards(each, "workers"),
        "refused_workers": _with_shards(each, "refused_workers"),
    }


def _shard(shard: int, status: dict[str, Any] | None, now: ClusterStatus) -> dict[str, Any]:
    """A shard's term, or the reason why its status is missing."""
    names = ("epoch", "uptime_s", "queue", "num_accepted", "num_refused", "tokens_per_s")
    failure = now.failures.get(shard)
    return {
        "shard": shard,
        **{name: None if status is None else status[name] for name in names},
        "error": None if failure is None else str(failure),
    }


def _with_shards(each: Mapping[int, Mapping[str, Any]], name: str) -> list[dict[str, Any]]:
    return [{"shard": shard, **one} for shard, status in each.items() for one in status[name]]


def status_json(now: GetStatusResponse, before: GetStatusResponse | None) -> dict[str, Any]:
    """A shard's status. Rates are None without a previous status of the same term."""
    changes = changes_of(now, before)
    rates = [change.rate(_scheduled) for change in changes]
    known = [rate for rate in rates if rate is not None]
    return {
        "epoch": now.epoch,
        "uptime_s": now.uptime_ms / 1000,
        "queue": {"num_requests": now.queue.num_requests, "num_tokens": now.queue.num_tokens},
        "num_accepted": now.num_accepted,
        "num_refused": now.num_refused,
        "tokens_per_s": sum(known) if known else None,
        "workers": [_worker(change) for change in changes],
        "refused_workers": [
            {"address": one.address, "reason": one.reason} for one in now.refused_workers
        ],
    }


def _worker(change: Change) -> dict[str, Any]:
    names = [field.name for field in WorkerStatus.DESCRIPTOR.fields if field.name not in _OMITTED]
    return {
        "incarnation": f"{change.now.incarnation:016x}",
        **{name: getattr(change.now, name) for name in names},
        "num_draft_tokens": list(change.now.num_draft_tokens),
        "num_accepted_tokens": list(change.now.num_accepted_tokens),
        "tokens_per_row_step": DecodeCounts.of([change.now]).tokens_per_step,
        "steps_per_s": change.rate(lambda one: one.num_steps),
        "tokens_per_s": change.rate(_scheduled),
        "output_tokens_per_s": change.rate(lambda one: one.num_sampled_tokens),
        "busy_share": change.busy_share,
    }


def _scheduled(worker: WorkerStatus) -> int:
    return worker.num_scheduled_tokens
