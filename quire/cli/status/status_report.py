"""Text of `quire status`: a scheduler's status, its rates of change, and maps of its blocks."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from quire.cli.table import aligned
from quire.client.decode_counts import DecodeCounts
from quire.client.operations import ClusterStatus
from quire.internal.v1.operations_pb2 import GetStatusResponse, WorkerStatus

# Lines for the maps of all workers together.
_MAP_LINES: Final = 16
_UNKNOWN: Final = "-"
_NS_PER_S: Final = 1e9
# Kinds of blocks, as numbered in operations.proto. The null block is not drawn.
_HELD, _CACHED, _FREE = 3, 2, 1
_MARKS: Final = {_HELD: "#", _CACHED: "+", _FREE: "."}
_KINDS: Final = {_HELD: "held", _CACHED: "cached", _FREE: "free"}


@dataclass(frozen=True)
class Change:
    """A worker's status, and the previous one if there is one."""

    now: WorkerStatus
    before: WorkerStatus | None
    seconds: float

    @property
    def is_reset(self) -> bool:
        return self.before is not None and self.now.num_steps < self.before.num_steps

    def rate(self, total: Callable[[WorkerStatus], float]) -> float | None:
        """Increase of a counter per second."""
        if self.before is None or self.seconds <= 0:
            return None
        return (total(self.now) - total(self.before)) / self.seconds

    @property
    def busy_share(self) -> float | None:
        """Share of the interval in which the worker was busy. Not of the time that it has reported:
        the next step reports all the idle time before it."""
        busy_s_per_s = self.rate(lambda worker: worker.busy_ns / _NS_PER_S)
        # A step that began before the interval is reported as a whole.
        return None if busy_s_per_s is None else min(busy_s_per_s, 1.0)


def report(now: GetStatusResponse, before: GetStatusResponse | None, width: int) -> list[str]:
    """Lines of a report, with the rates between two statuses of the same leadership."""
    changes = changes_of(now, before)
    return [
        *_summary(now, changes),
        "",
        *aligned([_HEADER, *(_row(change) for change in changes)], left=(0, len(_HEADER) - 1)),
        *_drafts(now),
        *_maps(now, width),
    ]


def cluster_report(now: ClusterStatus, before: ClusterStatus | None, width: int) -> list[str]:
    """Lines of a report on all shards: of a single one its own, of several their sums, and all
    workers with their shards."""
    previous = {} if before is None else before.statuses
    if now.num_shards == 1:
        return report(now.statuses[0], previous.get(0), width)
    changes = [
        (shard, change)
        for shard, status in now.statuses.items()
        for change in changes_of(status, previous.get(shard))
    ]
    workers = GetStatusResponse(workers=[change.now for _, change in changes])
    rows = [_with_shard(_row(change), str(shard)) for shard, change in changes]
    header = _with_shard(_HEADER, "SHARD")
    return [
        *_cluster_summary(now, [change for _, change in changes]),
        "",
        *aligned([header, *rows], left=(0, len(header) - 1)),
        *_drafts(workers),
        *_maps(workers, width),
    ]


def changes_of(now: GetStatusResponse, before: GetStatusResponse | None) -> list[Change]:
    """Each worker's change; without a previous status if that is none of the same term, or if the
    worker was connected again since, which resets its counters."""
    if before is None or before.epoch != now.epoch:
        return [Change(worker, None, 0.0) for worker in now.workers]
    seconds = (now.uptime_ms - before.uptime_ms) / 1000
    previous = {worker.incarnation: worker for worker in before.workers}
    changes = [Change(worker, previous.get(worker.incarnation), seconds) for worker in now.workers]
    return [replace(change, before=None) if change.is_reset else change for change in changes]


def _summary(now: GetStatusResponse, changes: list[Change]) -> list[str]:
    queue = now.queue
    return [
        f"up {_duration(now.uptime_ms // 1000)}  epoch {now.epoch}  workers {len(now.workers)}  "
        f"tokens/s {_number(_tokens_per_s(changes))}",
        f"queue {queue.num_requests:,} requests, {queue.num_tokens:,} tokens  "
        f"accepted {now.num_accepted:,}  refused {now.num_refused:,}",
        *(f"worker refused  {one.address}: {one.reason}" for one in now.refused_workers),
    ]


def _cluster_summary(now: ClusterStatus, changes: list[Change]) -> list[str]:
    all_of = now.statuses.values()
    refused = [
        f"worker refused  {one.address} (shard {shard}): {one.reason}"
        for shard, status in now.statuses.items()
        for one in status.refused_workers
    ]
    return [
        f"shards {now.num_shards}  workers {len(changes)}  "
        f"tokens/s {_number(_tokens_per_s(changes))}",
        f"queue {sum(one.queue.num_requests for one in all_of):,} requests, "
        f"{sum(one.queue.num_tokens for one in all_of):,} tokens  "
        f"accepted {sum(one.num_accepted for one in all_of):,}  "
        f"refused {sum(one.num_refused for one in all_of):,}",
        *(f"shard {shard} not shown  {error}" for shard, error in now.failures.items()),
        *refused,
    ]


def _tokens_per_s(changes: list[Change]) -> float | None:
    """Scheduled tokens of all workers that have a previous status; None if none has."""
    known = [rate for change in changes if (rate := change.rate(_scheduled)) is not None]
    return sum(known) if known else None


_HEADER: Final = [
    *("WORKER", "RUN", "WAIT", "SWAP", "STEP/S", "TOK/S", "OUT/S", "BUSY", "HITS", "PREEMPTED"),
    *("FORCED", "DRAFTS", "TOK/ROW", "HELD", "ADDRESS"),
]


def _row(change: Change) -> list[str]:
    worker = change.now
    counts = DecodeCounts.of([worker])
    return [
        _name(worker),
        f"{worker.num_running:,}",
        f"{worker.num_assigned:,}",
        f"{worker.num_swapped:,}",
        _number(change.rate(lambda one: one.num_steps), digits=1),
        _number(change.rate(_scheduled)),
        _number(change.rate(lambda one: one.num_sampled_tokens)),
        _percent(change.busy_share),
        _percent(_share(worker.num_hit_tokens, worker.num_queried_tokens)),
        f"{worker.num_preempted_by_recompute + worker.num_preempted_by_swap:,}",
        _percent(_share(worker.num_forced_tokens, worker.num_sampled_tokens)),
        _percent(counts.acceptance),
        _number(counts.tokens_per_step, digits=2),
        _percent(_share(worker.num_blocks - worker.num_free_blocks, worker.num_blocks)),
        worker.address + (" (draining)" if worker.draining else ""),
    ]


def _with_shard(row: list[str], shard: str) -> list[str]:
    """The row with its shard behind the worker's name."""
    name, *rest = row
    return [name, shard, *rest]


def _drafts(now: GetStatusResponse) -> list[str]:
    """Of each worker that has speculated, the accepted share of its first drafts, second ones, and
    so on."""
    counts = [(worker, DecodeCounts.of([worker])) for worker in now.workers]
    lines = [
        f"{_name(worker)}  accepted drafts by position: "
        + " ".join(map(_percent, each.acceptance_by_position))
        for worker, each in counts
        if sum(each.num_draft_tokens)
    ]
    return ["", *lines] if lines else []


def _maps(now: GetStatusResponse, width: int) -> list[str]:
    mapped = [worker for worker in now.workers if worker.block_map]
    height = max(1, _MAP_LINES // max(1, len(mapped)))
    lines = []
    for worker in mapped:
        cells, per_cell = draw_block_map(worker.block_map, width, height)
        lines += ["", f"{_name(worker)}  {block_map_legend(worker.block_map, per_cell)}", *cells]
    return lines


def draw_block_map(block_map: bytes, width: int, height: int) -> tuple[list[str], int]:
    """Draw a pool in at most `height` lines of `width` cells; also return the blocks per cell.

    A cell shows the kind of most of its blocks; of equally frequent kinds, held before cached
    before free.
    """
    blocks = block_map[1:]
    per_cell = max(1, -(-len(blocks) // (width * height)))
    cells = "".join(
        _mark(blocks[start : start + per_cell]) for start in range(0, len(blocks), per_cell)
    )
    return [cells[start : start + width] for start in range(0, len(cells), width)], per_cell


def block_map_legend(block_map: bytes, per_cell: int) -> str:
    """The meaning of the marks, with the share of each kind."""
    blocks = block_map[1:]
    total = max(1, len(blocks))
    shares = (
        f"{mark} {_KINDS[kind]} {blocks.count(kind) / total:.0%}" for kind, mark in _MARKS.items()
    )
    scale = "" if per_cell == 1 else f", {per_cell:,} to a character"
    return f"{'  '.join(shares)}  of {len(blocks):,} blocks{scale}"


def _mark(blocks: bytes) -> str:
    counts = Counter(blocks)
    return _MARKS[max(_MARKS, key=lambda kind: (counts[kind], kind))]


def _name(worker: WorkerStatus) -> str:
    """The first digits of the incarnation."""
    return f"{worker.incarnation:016x}"[:8]


def _scheduled(worker: WorkerStatus) -> int:
    return worker.num_scheduled_tokens


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _percent(share: float | None) -> str:
    return _UNKNOWN if share is None else f"{share:.0%}"


def _number(value: float | None, digits: int = 0) -> str:
    return _UNKNOWN if value is None else f"{value:,.{digits}f}"


def _duration(seconds: int) -> str:
    hours, rest = divmod(seconds, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}"
