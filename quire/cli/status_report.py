"""What `quire status` says: one reading of a scheduler, and what has changed since another."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from quire.cli import block_map
from quire.internal.v1.operations_pb2 import GetStatusResponse, WorkerStatus

# Lines that the maps of all workers take together, and the least that one takes.
_MAP_LINES: Final = 16
_UNKNOWN: Final = "-"


@dataclass(frozen=True)
class Change:
    """A worker's status, and the one before it, where there is one."""

    now: WorkerStatus
    before: WorkerStatus | None
    seconds: float

    def rate(self, total: Callable[[WorkerStatus], int]) -> float | None:
        """Of a total, by the second."""
        if self.before is None or self.seconds <= 0:
            return None
        return (total(self.now) - total(self.before)) / self.seconds

    @property
    def busy_share(self) -> float | None:
        """Of the time between."""
        if self.before is None:
            return None
        busy_ns = self.now.busy_ns - self.before.busy_ns
        return _share(busy_ns, busy_ns + self.now.idle_ns - self.before.idle_ns)


def report(now: GetStatusResponse, before: GetStatusResponse | None, width: int) -> list[str]:
    """Lines for people. Rates are those between the two readings; without an earlier one of the
    same leadership there are none.
    """
    changes = _changes(now, before)
    return [
        *_summary(now, changes),
        "",
        *_table([_HEADER, *(_row(change) for change in changes)]),
        *_maps(now, width),
    ]


def _changes(now: GetStatusResponse, before: GetStatusResponse | None) -> list[Change]:
    if before is None or before.epoch != now.epoch:
        return [Change(worker, None, 0.0) for worker in now.workers]
    seconds = (now.uptime_ms - before.uptime_ms) / 1000
    former = {worker.incarnation: worker for worker in before.workers}
    return [Change(worker, former.get(worker.incarnation), seconds) for worker in now.workers]


def _summary(now: GetStatusResponse, changes: list[Change]) -> list[str]:
    rates = [change.rate(_scheduled) for change in changes]
    known = [rate for rate in rates if rate is not None]
    total = sum(known) if known else None
    queue = now.queue
    return [
        f"up {_duration(now.uptime_ms // 1000)}  epoch {now.epoch}  workers {len(now.workers)}  "
        f"tokens/s {_number(total)}",
        f"queue {queue.num_requests:,} requests, {queue.num_tokens:,} tokens  "
        f"accepted {now.num_accepted:,}  refused {now.num_refused:,}",
    ]


_HEADER: Final = [
    *("WORKER", "RUN", "WAIT", "SWAP", "STEP/S", "TOK/S", "OUT/S", "BUSY", "HITS", "PREEMPTED"),
    *("HELD", "ADDRESS"),
]


def _row(change: Change) -> list[str]:
    worker = change.now
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
        _percent(_share(worker.num_blocks - worker.num_free_blocks, worker.num_blocks)),
        worker.address + (" (draining)" if worker.draining else ""),
    ]


def _table(rows: list[list[str]]) -> list[str]:
    """Names to the left, numbers to the right, as wide as they need."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(_aligned(row, widths)).rstrip() for row in rows]


def _aligned(row: list[str], widths: list[int]) -> list[str]:
    first, *numbers, last = row
    middle = [cell.rjust(width) for cell, width in zip(numbers, widths[1:-1], strict=True)]
    return [first.ljust(widths[0]), *middle, last]


def _maps(now: GetStatusResponse, width: int) -> list[str]:
    mapped = [worker for worker in now.workers if worker.block_map]
    height = max(1, _MAP_LINES // max(1, len(mapped)))
    lines = []
    for worker in mapped:
        cells, per_cell = block_map.draw(worker.block_map, width, height)
        lines += ["", f"{_name(worker)}  {block_map.legend(worker.block_map, per_cell)}", *cells]
    return lines


def _name(worker: WorkerStatus) -> str:
    """Enough of the incarnation to tell workers apart."""
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
