"""Text and JSON of `quire shards`. The JSON's keys are those of operations.proto."""

from typing import Any, Final

from quire.cli.table import aligned
from quire.internal.v1.operations_pb2 import GetClusterResponse

_HEADER: Final = ["SHARD", "WORKERS", "ASSIGNED", "LIVE", "WAITING", "LEADER"]


def shards_report(cluster: GetClusterResponse) -> list[str]:
    """Lines of a table of shards, and the schedulers that run."""
    rows = [
        [
            str(number),
            f"{shard.num_workers:,}",
            f"{len(shard.workers):,}",
            f"{shard.num_live:,}",
            f"{shard.num_waiting:,}",
            shard.leader or "-",
        ]
        for number, shard in enumerate(cluster.shards)
    ]
    schedulers = f"schedulers {len(cluster.schedulers)}: {', '.join(cluster.schedulers)}"
    return [*aligned([_HEADER, *rows], left=(len(_HEADER) - 1,)), "", schedulers]


def shards_json(cluster: GetClusterResponse) -> dict[str, Any]:
    return {
        "shards": [
            {
                "shard": number,
                "leader": shard.leader or None,
                "workers": list(shard.workers),
                "num_workers": shard.num_workers,
                "num_live": shard.num_live,
                "num_waiting": shard.num_waiting,
            }
            for number, shard in enumerate(cluster.shards)
        ],
        "schedulers": list(cluster.schedulers),
    }
