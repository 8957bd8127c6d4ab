"""The memory of one gateway that holds many streams to which nothing happens."""

import asyncio
import json
from pathlib import Path

from benchmarks.gateway.stack import simulated_stack
from benchmarks.report import Column, Part, Target
from quire.launcher.stack import LocalStack

_MAX_MB = 500.0
_MB = 1e6
# One request runs, with steps of an hour; all others wait.
_SETTINGS = {
    "QUIRE_WORKER_MAX_NUM_SEQS": "1",
    "QUIRE_WORKER_SIM_STEP_MS": "3600000",
    "QUIRE_SCHEDULER_STEP_TIMEOUT_S": "7200",
    "QUIRE_GATEWAY_DRAIN_GRACE_S": "0",
}
_PROMPT_TOKENS = 200
_WAIT_S = 30.0


def idle(num_streams: int) -> Part:
    """Open server-sent event streams by HTTP, wait, and read the gateway's memory."""
    with simulated_stack(_SETTINGS) as stack:
        before = _rss_mb(stack)
        after, num_open = asyncio.run(_hold(stack, num_streams))
    return Part(
        name="idle",
        title="Idle streams",
        notes=[
            f"Server-sent event streams of waiting requests with {_PROMPT_TOKENS} prompt tokens, "
            f"{_WAIT_S:g} s after the last one was opened. Resident memory of the gateway.",
        ],
        columns=[
            Column("streams", "streams", ",d"),
            Column("before", "before, MB", ",.0f"),
            Column("after", "with streams, MB", ",.0f"),
            Column("each", "per stream, kB", ",.1f"),
        ],
        rows=[
            {
                "streams": num_open,
                "before": before,
                "after": after,
                "each": 1e3 * (after - before) / num_streams,
            }
        ],
        targets=[
            Target("streams held", f"{num_streams:,}", f"{num_open:,}", num_open == num_streams),
            Target(
                "memory of the gateway",
                f"at most {_MAX_MB:g} MB",
                f"{after:.0f} MB",
                after <= _MAX_MB,
            ),
        ],
    )


async def _hold(stack: LocalStack, num_streams: int) -> tuple[float, int]:
    """The gateway's memory in MB and the number of open streams, after the wait."""
    address = stack.http_addresses[0]
    writers: list[asyncio.StreamWriter] = []
    opened = []
    # A hundred at a time: the subject is memory, not the accepting of connections.
    for start in range(0, num_streams, 100):
        count = min(100, num_streams - start)
        opened += await asyncio.gather(*(_open(address, writers) for _ in range(count)))
    await asyncio.sleep(_WAIT_S)
    num_open = sum(not reader.at_eof() for reader in opened)
    rss = _rss_mb(stack)
    for writer in writers:
        writer.close()
    return rss, num_open


async def _open(address: str, writers: list[asyncio.StreamWriter]) -> asyncio.StreamReader:
    """Open a stream and read the head of its response."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writers.append(writer)
    body = json.dumps({"model": "demo/model", "prompt": [7] * _PROMPT_TOKENS, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nContent-Length: {len(body)}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\n\r\n{body}".encode())
    response = await reader.readuntil(b"\r\n\r\n")
    if not response.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(response.decode())
    return reader


def _rss_mb(stack: LocalStack) -> float:
    [gateway] = stack.processes("gateway")
    status = Path(f"/proc/{gateway.pid}/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) * 1024 / _MB
