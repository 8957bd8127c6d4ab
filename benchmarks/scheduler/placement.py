"""Where a gateway sends a request, by its own pure modules and by what the leaders report."""

import time
from collections.abc import Sequence

from benchmarks.scheduler.shard_stream import ShardStream
from benchmarks.scheduler.workload import Request
from gateway_svc.scheduler.prefix_keys import PrefixKeys
from gateway_svc.scheduler.shard_choice import ShardLoad, choose, rendezvous_order


class PlacedShards:
    """Chooses by prefixes and loads, as one gateway with all requests."""

    def __init__(self, streams: Sequence[ShardStream]) -> None:
        self._streams = streams
        self._keys = PrefixKeys()

    def shard_of(self, request: Request) -> int:
        num_shards = len(self._streams)
        key = self._keys.choose(request.prompt, b"", num_shards, time.monotonic())
        order = rendezvous_order(key, num_shards)
        return choose(order, self._loads()).shards[0]

    def _loads(self) -> list[ShardLoad]:
        """The leaders report their workers; a gateway knows its own requests at once."""
        return [
            ShardLoad(self._num_workers(shard), stream.num_live)
            for shard, stream in enumerate(self._streams)
        ]

    def _num_workers(self, shard: int) -> int:
        shards = self._streams[shard].cluster.shards
        return shards[shard].num_workers if shard < len(shards) else 1
