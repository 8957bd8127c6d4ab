"""`python -m benchmarks.scheduler.load CONTROL [SCHEDULER]`: a load generator.

Speaks the gateway's side of the Connect streams, one per shard: submits requests and counts tokens.
Does little work per frame and none per token. Without SCHEDULER it connects by the command
`connect`.
"""

import asyncio
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, cycle, repeat
from pathlib import Path

from benchmarks.scheduler import control
from benchmarks.scheduler.placement import PlacedShards
from benchmarks.scheduler.shard_stream import ShardStream
from benchmarks.scheduler.workload import Request, Workload, requests
from quire.internal.v1 import scheduler_pb2


class Load:
    """Keeps a number of requests at the shards."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._tasks: list[asyncio.Task[None]] = []
        self._streams: list[ShardStream] = []
        self._pending: Iterator[Request] = iter(())
        self._num_gateways = 1
        # The position of a stream.
        self._shard_of: Callable[[Request], int] = lambda _: 0

    # `connect`, `start` and `progress` are called on the control thread.

    def connect(self, leaders: Sequence[str], num_gateways: int = 1) -> None:
        """Open streams to the leaders of the shards, in the order of the shards' numbers: one for
        each of several gateways."""
        self._loop.call_soon_threadsafe(self.open, leaders, num_gateways)

    def start(
        self, shares: Sequence[int] | None = None, is_placed: bool = False, **workload: object
    ) -> None:
        """Submit the workload's requests, up to its concurrency at a time.

        `shares` are the requests that each shard gets of so many, from the gateways in rotation; by
        default all go to the first shard. With `is_placed` they go where a gateway would send them.
        """
        found = Workload(**workload)  # type: ignore[arg-type]
        self._loop.call_soon_threadsafe(self._start, found, shares, is_placed)

    def progress(self) -> dict[str, object]:
        streams = self._streams
        return {
            "at_s": time.monotonic(),
            "tokens_at_s": max((stream.tokens_at_s for stream in streams), default=0.0),
            "ready": bool(streams) and all(stream.is_ready for stream in streams),
            "accepted": sum(stream.num_accepted for stream in streams),
            "started": sum(stream.num_started for stream in streams),
            "ended": sum(stream.num_ended for stream in streams),
            "tokens": sum(stream.num_tokens for stream in streams),
            "frames": sum(stream.num_frames for stream in streams),
            "frame_bytes": sum(stream.num_frame_bytes for stream in streams),
            "states": sum(stream.num_states for stream in streams),
            "state_bytes": sum(stream.num_state_bytes for stream in streams),
            # By stream: tokens and their last arrival; requests, and the seconds they have lived.
            "tokens_of": [(stream.num_tokens, stream.tokens_at_s) for stream in streams],
            "moved": sum(stream.num_moved for stream in streams),
            "submitted": [stream.num_submitted for stream in streams],
            "live_s": [stream.live_s for stream in streams],
            "failures": [failure for stream in streams for failure in stream.failures][:3],
        }

    def open(self, leaders: Sequence[str], num_gateways: int = 1) -> None:
        self._num_gateways = num_gateways
        # Those of the first gateway, of the second one, ...
        self._streams = [
            ShardStream(address, shard, self._submit, self._mover(gateway), gateway)
            for gateway in range(num_gateways)
            for shard, address in enumerate(leaders)
        ]
        self._tasks += [asyncio.create_task(stream.run()) for stream in self._streams]
        for task in self._tasks:
            task.add_done_callback(_end_on_error)

    def _start(self, workload: Workload, shares: Sequence[int] | None, is_placed: bool) -> None:
        self._pending = requests(workload)
        if is_placed:
            self._shard_of = PlacedShards(self._streams).shard_of
        elif shares is not None:
            order = cycle(chain.from_iterable(repeat(k, n) for k, n in enumerate(shares)))
            gateways = cycle(range(self._num_gateways))
            self._shard_of = lambda _: next(order) + next(gateways) * len(shares)
        self._submit(workload.concurrency)

    def _mover(self, gateway: int) -> Callable[[scheduler_pb2.Submission, int], None]:
        """Passes a gateway's requests on to the shards that have taken them."""

        def move(submission: scheduler_pb2.Submission, shard: int) -> None:
            num_shards = len(self._streams) // self._num_gateways
            self._streams[gateway * num_shards + shard].submit(submission)

        return move

    def _submit(self, count: int) -> None:
        """Submit the next requests, as many as have ended."""
        for _ in range(count):
            request = next(self._pending, None)
            if request is None:
                return
            self._streams[self._shard_of(request)].submit(request)


def _end_on_error(task: asyncio.Task[None]) -> None:
    """End the process, and so the measurement, with the error of a stream."""
    if not task.cancelled() and (error := task.exception()) is not None:
        print(f"a stream has ended: {error}", file=sys.stderr)
        asyncio.get_running_loop().stop()


async def _main(path: Path, addresses: Sequence[str]) -> None:
    load = Load()
    if addresses:
        load.open(addresses)
    control.serve(path, {"connect": load.connect, "start": load.start, "progress": load.progress})
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1]), sys.argv[2:3]))
