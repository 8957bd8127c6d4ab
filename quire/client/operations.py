"""A client of a scheduler's operations."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import grpc

from quire.client.errors import QuireError, translate_errors
from quire.client.targets import check_target, client_options
from quire.internal.v1 import operations_pb2, operations_pb2_grpc
from quire.service.tls import TLS, open_channel

DEFAULT_SCHEDULER = "127.0.0.1:50052"


class Operations:
    """A client of `OperationsService`. Calls raise QuireError; later calls may succeed."""

    def __init__(self, target: str = DEFAULT_SCHEDULER, tls: TLS | None = None) -> None:
        check_target(target)
        self.target = target
        self._channel = open_channel(target, client_options(target), tls)
        self._stub = operations_pb2_grpc.OperationsServiceStub(self._channel)

    def status(
        self, with_block_maps: bool, timeout_s: float | None
    ) -> operations_pb2.GetStatusResponse:
        request = operations_pb2.GetStatusRequest(with_block_maps=with_block_maps)
        with _scheduler_errors(self.target):
            return self._stub.GetStatus(request, timeout=timeout_s)

    def reset_prefix_cache(self, timeout_s: float | None) -> int:
        """Return the number of blocks that were removed from the prefix cache."""
        request = operations_pb2.ResetPrefixCacheRequest()
        with _scheduler_errors(self.target):
            return self._stub.ResetPrefixCache(request, timeout=timeout_s).num_blocks

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


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
