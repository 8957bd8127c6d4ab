"""A client of a scheduler's operations."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final, Self, TypeVar

import grpc

from quire.client.errors import QuireError, translate_errors
from quire.client.targets import check_target, client_options
from quire.internal.v1 import operations_pb2, operations_pb2_grpc
from quire.service.tls import TLS, open_channel

DEFAULT_SCHEDULER = "127.0.0.1:50052"
# The reason of an error of the leader that a standby has named.
LEADER_FAILS: Final = "LEADER_FAILS"
# A scheduler that has stopped, or stands by.
_AWAY: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
# At once.
_MAX_CALLS: Final = 16

_Reply = TypeVar("_Reply")


@dataclass(frozen=True)
class ClusterStatus:
    """The statuses of all shards."""

    # By shard, those that were read, and why others were not.
    statuses: Mapping[int, operations_pb2.GetStatusResponse]
    failures: Mapping[int, QuireError]

    @property
    def num_shards(self) -> int:
        return len(self.statuses) + len(self.failures)


class Operations:
    """A client of `OperationsService`. Calls about a shard that the target does not lead go to the
    leader that it names. Calls raise QuireError; later calls may succeed."""

    def __init__(self, target: str = DEFAULT_SCHEDULER, tls: TLS | None = None) -> None:
        self._tls = tls
        self._target = _Scheduler(target, tls)
        # By address, the schedulers that the target has named.
        self._others: dict[str, _Scheduler] = {}
        # By shard, the leader that the target named last, if it does not lead the shard itself.
        self._leaders: dict[int, _Scheduler] = {}

    def status(
        self, with_block_maps: bool, timeout_s: float | None, shard: int = 0
    ) -> operations_pb2.GetStatusResponse:
        request = operations_pb2.GetStatusRequest(with_block_maps=with_block_maps, shard=shard)
        return self._call(shard, lambda stub: stub.GetStatus(request, timeout=timeout_s))

    def statuses(self, with_block_maps: bool, timeout_s: float | None) -> ClusterStatus:
        """The status of every shard. The error of the first one if there is no status at all."""
        return ClusterStatus(
            *self._of_all(lambda shard: self.status(with_block_maps, timeout_s, shard), timeout_s)
        )

    def reset_prefix_cache(self, timeout_s: float | None, shard: int = 0) -> int:
        """Return the number of blocks that were removed from the prefix cache."""
        request = operations_pb2.ResetPrefixCacheRequest(shard=shard)
        return self._call(
            shard, lambda stub: stub.ResetPrefixCache(request, timeout=timeout_s)
        ).num_blocks

    def reset_prefix_caches(
        self, timeout_s: float | None
    ) -> tuple[dict[int, int], dict[int, QuireError]]:
        """By shard, the blocks that were removed, and the errors of shards whose caches were not
        reset. The error of the first one if none was."""
        return self._of_all(lambda shard: self.reset_prefix_cache(timeout_s, shard), timeout_s)

    def cluster(self, timeout_s: float | None) -> operations_pb2.GetClusterResponse:
        """The shards, as the target knows them, or another scheduler if the target is
        unavailable."""
        request = operations_pb2.GetClusterRequest()
        try:
            return self._target.call(lambda stub: stub.GetCluster(request, timeout=timeout_s))
        except QuireError as error:
            if error.code not in _AWAY:
                raise
            for other in list(self._others.values()):
                with suppress(QuireError):
                    return other.call(lambda stub: stub.GetCluster(request, timeout=timeout_s))
            raise

    def set_num_shards(self, num_shards: int, timeout_s: float | None) -> None:
        """Raise the number of shards. InvalidArgumentError for a lower one."""
        request = operations_pb2.SetNumShardsRequest(num_shards=num_shards)
        self._call(0, lambda stub: stub.SetNumShards(request, timeout=timeout_s))

    def close(self) -> None:
        for scheduler in (self._target, *self._others.values()):
            scheduler.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _of_all(
        self, call: Callable[[int], _Reply], timeout_s: float | None
    ) -> tuple[dict[int, _Reply], dict[int, QuireError]]:
        """Call for each shard, for several at once; replies and errors by shard."""
        num_shards = len(self.cluster(timeout_s).shards)
        if num_shards <= 1:
            return {0: call(0)}, {}
        replies: dict[int, _Reply] = {}
        failures: dict[int, QuireError] = {}
        with ThreadPoolExecutor(min(num_shards, _MAX_CALLS)) as pool:
            calls = [pool.submit(call, shard) for shard in range(num_shards)]
        for shard, done in enumerate(calls):
            try:
                replies[shard] = done.result()
            except QuireError as error:
                failures[shard] = error
        if not replies:
            raise failures[0]
        return replies, failures

    def _call(
        self, shard: int, call: Callable[[operations_pb2_grpc.OperationsServiceStub], _Reply]
    ) -> _Reply:
        """Call the shard's leader."""
        leader = self._leaders.get(shard)
        if leader is not None:
            try:
                return leader.call(call)
            except QuireError as error:
                if error.code not in _AWAY:
                    raise
                # It leads no more: the target knows who does.
                self._leaders.pop(shard, None)
        try:
            return self._target.call(call)
        except QuireError as error:
            if error.leader is None:
                raise
            named = error.leader
        return self._call_named(shard, named, call)

    def _call_named(
        self,
        shard: int,
        address: str,
        call: Callable[[operations_pb2_grpc.OperationsServiceStub], _Reply],
    ) -> _Reply:
        """Call the leader that the target has just named."""
        if address not in self._others:
            self._others[address] = _Scheduler(address, self._tls)
        leader = self._leaders[shard] = self._others[address]
        try:
            return leader.call(call)
        except QuireError as error:
            if error.code not in _AWAY:
                raise
            message = (
                f"the scheduler at {self._target.address} stands by and names the leader at "
                f"{address}, which fails: {error.message}"
            )
            self._leaders.pop(shard, None)
            raise QuireError(error.code, message, reason=LEADER_FAILS) from error


class _Scheduler:
    """A channel to one scheduler."""

    def __init__(self, address: str, tls: TLS | None) -> None:
        self.address = check_target(address)
        self._channel = open_channel(address, client_options(address), tls)
        self._stub = operations_pb2_grpc.OperationsServiceStub(self._channel)

    def call(self, call: Callable[[operations_pb2_grpc.OperationsServiceStub], _Reply]) -> _Reply:
        with _scheduler_errors(self.address):
            return call(self._stub)

    def close(self) -> None:
        self._channel.close()


@contextmanager
def _scheduler_errors(target: str) -> Iterator[None]:
    """Replace UNIMPLEMENTED, which other services' servers return, by a clear message."""
    try:
        with translate_errors(target):
            yield
    except QuireError as error:
        if error.code is not grpc.StatusCode.UNIMPLEMENTED:
            raise
        raise QuireError(error.code, f"no scheduler at {target}") from error
