"""Memory of waiting requests, and objects left after they end."""

from benchmarks.report import Cell, Column, Part, Target
from benchmarks.scheduler.proc import peak_rss_mb
from benchmarks.scheduler.stack import BenchStack, Setting
from benchmarks.scheduler.throughput import BLOCK_SIZE
from benchmarks.scheduler.workload import Workload

PROMPT_TOKENS = 1000
_OUTPUT_TOKENS = 4
_MAX_BATCHED_TOKENS = 16384
_TIMEOUT_S = 300.0
_RELEASE_TIMEOUT_S = 5.0
_NUM_WAVES = 2
_TARGET_MB = 300.0
_TARGET_GROWTH = 0.05


def memory(num_requests: int) -> Part:
    """Hold the worker while a wave of requests arrives, then let it run; repeat."""
    setting = Setting(
        model={
            "max_model_len": 2048,
            "block_size": BLOCK_SIZE,
            "num_blocks": 4096,
            "max_num_seqs": 256,
            "max_num_batched_tokens": _MAX_BATCHED_TOKENS,
        },
        scheduler={
            "max-num-batched-tokens": _MAX_BATCHED_TOKENS,
            "max-waiting-requests": num_requests + 1,
        },
    )
    with BenchStack(setting) as stack:
        [pid] = stack.pids["scheduler"]
        rows: list[dict[str, Cell]] = [
            {"moment": "no request yet", "peak_mb": peak_rss_mb(pid), **stack.probe.call("alive")}
        ]
        for wave in range(1, _NUM_WAVES + 1):
            rows += _wave(stack, wave, num_requests)
        stack.check()
    return _part(num_requests, rows)


def _wave(stack: BenchStack, wave: int, num_requests: int) -> list[dict[str, Cell]]:
    [pid] = stack.pids["scheduler"]
    [host] = stack.hosts
    host.call("hold")
    stack.run(
        Workload(
            num_requests=num_requests,
            concurrency=num_requests,
            prompt_tokens=(PROMPT_TOKENS, PROMPT_TOKENS),
            output_tokens=(_OUTPUT_TOKENS, _OUTPUT_TOKENS),
        )
    )
    stack.wait_for("accepted", wave * num_requests, _TIMEOUT_S)
    waiting = {"moment": f"wave {wave} waits", "peak_mb": peak_rss_mb(pid)}
    host.call("release")
    stack.wait_for("ended", wave * num_requests, _TIMEOUT_S)
    # The end of a request is delivered before its record is written.
    alive = stack.until(
        lambda: stack.probe.call("alive"),
        lambda counts: not any(counts.values()),
        _RELEASE_TIMEOUT_S,
    )
    return [waiting, {"moment": f"wave {wave} is over", "peak_mb": peak_rss_mb(pid), **alive}]


def _part(num_requests: int, rows: list[dict[str, Cell]]) -> Part:
    first, last = rows[2], rows[-1]
    first_mb, last_mb = float(first["peak_mb"] or 0), float(last["peak_mb"] or 0)
    num_alive = sum(int(last[key] or 0) for key in ("groups", "sequences"))
    growth = last_mb / first_mb - 1
    return Part(
        name="memory",
        title=f"Memory with {num_requests:,} waiting requests of {PROMPT_TOKENS:,} tokens",
        notes=[
            "The scheduler's peak resident memory so far (10^6 bytes), and the request objects "
            "that its garbage collector can reach. The difference to the first row is the memory "
            "of the requests.",
        ],
        columns=[
            Column("moment", "moment"),
            Column("peak_mb", "peak MB", ".1f"),
            Column("groups", "groups alive", "d"),
            Column("sequences", "sequences alive", "d"),
        ],
        rows=rows,
        targets=[
            Target("peak", f"under {_TARGET_MB:g} MB", f"{last_mb:.0f} MB", last_mb < _TARGET_MB),
            Target(
                "second wave raises the peak",
                f"by less than {_TARGET_GROWTH:.0%}",
                f"{growth:.1%}",
                growth < _TARGET_GROWTH,
            ),
            Target("alive after it", "0", f"{num_alive}", num_alive == 0),
        ],
    )
