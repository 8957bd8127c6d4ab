"""Streams that are open while something is done to a service, each compared with the same request
undisturbed."""

import math
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace

from waiting import until

from benchmarks.chaos.gaps import Window, percentile
from benchmarks.chaos.mix import KINDS, Ask, catalogue
from benchmarks.chaos.stack import LOGPROB_TOLERANCES
from benchmarks.chaos.streams import Reference, Streams
from quire.client import Client
from quire.outputs import RequestOutput

_NUM_STREAMS = 16
_NUM_REQUESTS = 24
_SEED = 5
# The last streams of a test end soon.
_MOST_TOKENS = 128
_SHORTER = [
    replace(kind, max_tokens=(min(kind.max_tokens[0], _MOST_TOKENS // 2), _MOST_TOKENS))
    for kind in KINDS
]
# A service of the images takes a while to start on a busy machine.
GOES_ON_S = 60.0


def undisturbed(target: str) -> list[Reference]:
    """A mix of requests, and what comes of them when nothing is done to the service."""
    asks = catalogue(_SEED, _NUM_REQUESTS, _SHORTER)
    with Client(target) as client, ThreadPoolExecutor(len(asks)) as threads:

        def ask(one: Ask) -> RequestOutput:
            return client.generate(one.prompt, one.params, timeout_s=120)

        tolerance = LOGPROB_TOLERANCES["demo"]
        outputs = threads.map(ask, asks)
        return [Reference(*pair, tolerance) for pair in zip(asks, outputs, strict=True)]


@asynccontextmanager
async def streaming(target: str, references: Sequence[Reference]) -> AsyncIterator[Streams]:
    """Streams that are always open within the context. In the end nothing has been lost, repeated
    or changed, and none has failed or stands still."""
    streams = Streams([target], references, _NUM_STREAMS, time.time_ns())
    streams.start()
    try:
        await until(lambda: len(streams.unmoved_since(math.inf)) == _NUM_STREAMS, "all streams")
        await go_on(streams)
        yield streams
        assert await streams.finish(GOES_ON_S) == []
        streams.check()
    finally:
        await streams.close()
    assert {str(life): life.comparison.findings for life in streams.wrong} == {}


async def go_on(streams: Streams) -> None:
    """Returns when every stream has moved."""
    now_s = time.monotonic()
    await until(lambda: not streams.unmoved_since(now_s), "all streams' going on", GOES_ON_S)


@contextmanager
def told(what: str, streams: Streams) -> Iterator[None]:
    """Prints how long the streams stood still while something was done."""
    streams.forget()
    begin_s = time.monotonic()
    yield
    window = Window(begin_s, time.monotonic())
    pauses = [pause.seconds for _, pause in streams.pauses(window)]
    print(
        f"{what}: over after {window.end_s - begin_s:.1f} s; longest pauses of {len(pauses)} "
        f"streams: median {percentile(pauses, 50):.2f} s, longest {max(pauses):.2f} s"
    )
