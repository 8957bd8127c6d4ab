"""How long small calls wait beside requests of megabytes that the gateway refuses."""

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

import grpc

from benchmarks.gateway.oversized_sender import AT_ONCE, NUM_MESSAGES, WAVE_PERIOD_S, WAVES
from benchmarks.gateway.stack import ROOT, simulated_stack
from benchmarks.report import Cell, Column, Part, Target
from benchmarks.scheduler.proc import peak_rss_mb
from quire.launcher.stack import LocalStack
from quire.service.channels import channel_options
from quire.v1 import tokenizer_pb2, tokenizer_pb2_grpc

# Small calls begin at this rate, whether or not earlier ones have ended.
_CALL_PERIOD_S = 0.003
_NUM_CALLS = round(WAVES * WAVE_PERIOD_S / _CALL_PERIOD_S)
_MAX_WAIT_MS = 100.0
_MAX_PEAK_MB = 1024.0
_LABELS = ("alone", f"beside {AT_ONCE} oversized requests")

SmallCall = Callable[[], Awaitable[object]]


@dataclass(frozen=True)
class _Waits:
    """Milliseconds from the start of small calls to their end, in one round."""

    p50: float
    p99: float
    longest: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "_Waits":
        hundredths = quantiles(seconds, n=100, method="inclusive")
        return cls(1e3 * hundredths[49], 1e3 * hundredths[98], 1e3 * max(seconds))


def oversized(num_rounds: int) -> Part:
    """Measure small calls alone and beside waves of oversized requests, by gRPC and by HTTP."""
    rows: list[dict[str, Cell]] = []
    targets: list[Target] = []
    for protocol, measure in (("gRPC", _measure_grpc), ("HTTP", _measure_http)):
        with simulated_stack({}) as stack:
            # The first round warms up.
            alone, beside = zip(
                *[asyncio.run(measure(stack)) for _ in range(num_rounds + 1)][1:], strict=True
            )
            peak_mb = peak_rss_mb(stack.processes("gateway")[0].pid)
        rows += [
            _row(f"{protocol}, {_LABELS[0]}", alone),
            {**_row(f"{protocol}, {_LABELS[1]}", beside), "peak_mb": peak_mb},
        ]
        targets += _targets(protocol, median(one.longest for one in beside), peak_mb)
    return Part(
        name="oversized",
        title="Oversized requests",
        notes=[
            f"{AT_ONCE} requests at once, and again every {WAVE_PERIOD_S:g} s or when these have "
            f"ended, from another process: of {2 * NUM_MESSAGES / 1e6:.0f} MB each, with "
            f"{NUM_MESSAGES:,} empty messages by gRPC. "
            f"A text is tokenized every {1e3 * _CALL_PERIOD_S:g} ms, by the same protocol; waits "
            f"are the times of these small calls, in ms: medians of {num_rounds} rounds of "
            f"{_NUM_CALLS:,} calls, and the longest of all rounds. The model is the demo model.",
        ],
        columns=[
            Column("what", "small calls"),
            Column("p50", "p50", ",.1f"),
            Column("p99", "p99", ",.1f"),
            Column("max", "max", ",.1f"),
            Column("worst", "max of all rounds", ",.1f"),
            Column("peak_mb", "gateway's peak, MB", ",.0f"),
        ],
        rows=rows,
        targets=targets,
    )


def _row(what: str, waits: Sequence[_Waits]) -> dict[str, Cell]:
    return {
        "what": what,
        "p50": median(one.p50 for one in waits),
        "p99": median(one.p99 for one in waits),
        "max": median(one.longest for one in waits),
        "worst": max(one.longest for one in waits),
    }


def _targets(protocol: str, longest_ms: float, peak_mb: float) -> list[Target]:
    return [
        Target(
            f"{protocol}: longest wait, median of the rounds",
            f"at most {_MAX_WAIT_MS:g} ms",
            f"{longest_ms:.0f} ms",
            longest_ms <= _MAX_WAIT_MS,
        ),
        Target(
            f"{protocol}: peak memory of the gateway",
            f"at most {_MAX_PEAK_MB:g} MB",
            f"{peak_mb:.0f} MB",
            peak_mb <= _MAX_PEAK_MB,
        ),
    ]


async def _measure_grpc(stack: LocalStack) -> tuple[_Waits, _Waits]:
    request = tokenizer_pb2.TokenizeRequest(text="Return")
    async with grpc.aio.insecure_channel(stack.address, options=channel_options()) as channel:
        await channel.channel_ready()
        stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        return await _alone_and_beside(lambda: stub.Tokenize(request), "grpc", stack.address)


async def _measure_http(stack: LocalStack) -> tuple[_Waits, _Waits]:
    calls = _HttpCalls(stack.http_addresses[0])
    try:
        return await _alone_and_beside(calls.tokenize, "http", stack.http_addresses[0])
    finally:
        calls.close()


class _HttpCalls:
    """Small calls over kept connections, with little work of the client."""

    def __init__(self, address: str) -> None:
        body = json.dumps({"prompt": "Return"})
        self._address = address
        self._request = (
            f"POST /tokenize HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}"
        ).encode()
        self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def tokenize(self) -> None:
        while True:
            reader, writer = await self._connection()
            writer.write(self._request)
            try:
                head = await reader.readuntil(b"\r\n\r\n")
                break
            except (ConnectionError, asyncio.IncompleteReadError):
                # The server closes connections that were idle for seconds.
                writer.close()
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(head.decode())
        length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
        await reader.readexactly(int(length))
        self._free.append((reader, writer))

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self._free:
            reader, writer = self._free.pop()
            if not reader.at_eof():
                return reader, writer
            writer.close()
        host, _, port = self._address.rpartition(":")
        return await asyncio.open_connection(host, int(port))

    def close(self) -> None:
        for _, writer in self._free:
            writer.close()


async def _alone_and_beside(call: SmallCall, protocol: str, address: str) -> tuple[_Waits, _Waits]:
    alone = await _waits(call)
    sender = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.gateway.oversized_sender", protocol, address),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert sender.stdin is not None
    assert sender.stdout is not None
    await sender.stdout.readline()
    sender.stdin.write(b"\n")
    beside = await _waits(call)
    await sender.communicate()
    if sender.returncode:
        raise RuntimeError("the oversized requests did not end as expected")
    return alone, beside


async def _waits(call: SmallCall) -> _Waits:
    async def timed() -> float:
        began = time.perf_counter()
        await call()
        return time.perf_counter() - began

    began = time.perf_counter()
    calls = []
    for number in range(_NUM_CALLS):
        await asyncio.sleep(max(0.0, began + number * _CALL_PERIOD_S - time.perf_counter()))
        calls.append(asyncio.create_task(timed()))
    return _Waits.of(await asyncio.gather(*calls))
