"""A client of a scheduler's operations."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

_Reply = TypeVar("_Reply")


class Operations:
    """A client of `OperationsService`. Calls to a standby go to the leader that it names. Calls
    raise QuireError; later calls may succeed."""

    def __init__(self, target: str = DEFAULT_SCHEDULER, tls: TLS | None = None) -> None:
        self._tls = tls
        self._target = _Scheduler(target, tls)
        # The leader that the target named last, if the target stood by.
        self._leader: _Scheduler | None = None

    def status(
        self, with_block_maps: bool, timeout_s: float | None
    ) -> operations_pb2.GetStatusResponse:
        request = operations_pb2.GetStatusRequest(with_block_maps=with_block_maps)
        return self._call(lambda stub: stub.GetStatus(request, timeout=timeout_s))

    def reset_prefix_cache(self, timeout_s: float | None) -> int:
        """Return the number of blocks that were removed from the prefix cache."""
        request = operations_pb2.ResetPrefixCacheRequest()
        return self._call(lambda stub: stub.ResetPrefixCache(request, timeout=timeout_s)).num_blocks

    def close(self) -> None:
        self._target.close()
        self._set_leader(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _call(self, call: Callable[[operations_pb2_grpc.OperationsServiceStub], _Reply]) -> _Reply:
        if self._leader is not None:
            try:
                return self._leader.call(call)
            except QuireError as error:
                if error.code not in _AWAY:
                    raise
                # It leads no more: the target knows who does.
                self._set_leader(None)
        try:
            return self._target.call(call)
        except QuireError as error:
            if error.leader is None:
                raise
            self._set_leader(error.leader)
        return self._call_leader(call)

    def _call_leader(
        self, call: Callable[[operations_pb2_grpc.OperationsServiceStub], _Reply]
    ) -> _Reply:
        """Call the leader that the target has just named."""
        assert self._leader is not None
        try:
            return self._leader.call(call)
        except QuireError as error:
            message = (
                f"the scheduler at {self._target.address} stands by and names the leader at "
                f"{self._leader.address}, which fails: {error.message}"
            )
            self._set_leader(None)
            raise QuireError(error.code, message, reason=LEADER_FAILS) from error

    def _set_leader(self, address: str | None) -> None:
        if self._leader is not None:
            self._leader.close()
        self._leader = None if address is None else _Scheduler(address, self._tls)


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
