"""Streams that are open during a fault, each compared with the same request without faults."""

import math
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace

from waiting import until

from benchmarks.chaos.gaps import Window, percentile
from benchmarks.chaos.mix import KINDS, Request, catalogue
from benchmarks.chaos.stack import LOGPROB_TOLERANCES
from benchmarks.chaos.streams import Reference, Streams
from quire.client.client import Client
from quire.client.outputs import RequestOutput

_NUM_STREAMS = 16
_NUM_REQUESTS = 24
_SEED = 5
# Short, so that a test ends soon.
_MOST_TOKENS = 128
_SHORTER = [
    replace(kind, max_tokens=(min(kind.max_tokens[0], _MOST_TOKENS // 2), _MOST_TOKENS))
    for kind in KINDS
]
# Containers start slowly on a busy machine.
PROGRESS_TIMEOUT_S = 60.0


def make_references(target: str) -> list[Reference]:
    """Run a mix of requests without faults."""
    requests = catalogue(_SEED, _NUM_REQUESTS, _SHORTER)
    with Client(target) as client, ThreadPoolExecutor(len(requests)) as threads:

        def request(one: Request) -> RequestOutput:
            return client.generate(one.prompt, one.params, timeout_s=120)

        tolerance = LOGPROB_TOLERANCES["demo"]
        outputs = threads.map(request, requests)
        return [Reference(*pair, tolerance) for pair in zip(requests, outputs, strict=True)]


@asynccontextmanager
async def streaming(target: str, references: Sequence[Reference]) -> AsyncIterator[Streams]:
    """Keep streams open within the context, then check that nothing was lost, repeated or changed,
    and that none has failed or stalled."""
    streams = Streams([target], references, _NUM_STREAMS, time.time_ns())
    streams.start()
    try:
        await until(lambda: len(streams.stalled_since(math.inf)) == _NUM_STREAMS, "all streams")
        await wait_for_progress(streams)
        yield streams
        assert await streams.finish(PROGRESS_TIMEOUT_S) == []
        streams.check()
    finally:
        await streams.close()
    assert {str(stream): stream.comparison.findings for stream in streams.wrong} == {}


async def wait_for_progress(streams: Streams) -> None:
    """Wait until every stream has received a message."""
    now_s = time.monotonic()
    await until(
        lambda: not streams.stalled_since(now_s), "progress of all streams", PROGRESS_TIMEOUT_S
    )


@contextmanager
def reported_pauses(what: str, streams: Streams) -> Iterator[None]:
    """Print the streams' longest pauses within the context."""
    streams.clear_finished()
    begin_s = time.monotonic()
    yield
    window = Window(begin_s, time.monotonic())
    pauses = [pause.seconds for _, pause in streams.pauses(window)]
    print(
        f"{what}: over after {window.end_s - begin_s:.1f} s; longest pauses of {len(pauses)} "
        f"streams: median {percentile(pauses, 50):.2f} s, longest {max(pauses):.2f} s"
    )
