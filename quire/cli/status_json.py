"""The JSON of `quire status`. Its keys are those of operations.proto, and rates in seconds."""

from typing import Any, Final

from quire.cli.status_report import Change, changes_of
from quire.client.decode_counts import DecodeCounts
from quire.internal.v1.operations_pb2 import GetStatusResponse, WorkerStatus

# The incarnation has too many digits for a number in JSON; a map is no text.
_OMITTED: Final = {"incarnation", "block_map"}


def status_json(now: GetStatusResponse, before: GetStatusResponse | None) -> dict[str, Any]:
    """A status. Rates are None without a previous status of the same term."""
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
