"""What operators ask of a scheduler."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import grpc

from quire.errors import QuireError, clear_errors
from quire.internal.v1 import operations_pb2, operations_pb2_grpc
from quire.targets import check_target, client_options

DEFAULT_SCHEDULER = "127.0.0.1:50052"


class Operations:
    """A scheduler's `OperationsService`. Every call may raise QuireError, and one after it may
    succeed: a scheduler that comes back is found again.
    """

    def __init__(self, target: str = DEFAULT_SCHEDULER) -> None:
        check_target(target)
        self.target = target
        self._channel = grpc.insecure_channel(target, options=client_options(target))
        self._stub = operations_pb2_grpc.OperationsServiceStub(self._channel)

    def status(
        self, with_block_maps: bool, timeout_s: float | None
    ) -> operations_pb2.GetStatusResponse:
        request = operations_pb2.GetStatusRequest(with_block_maps=with_block_maps)
        with _scheduler_errors(self.target):
            return self._stub.GetStatus(request, timeout=timeout_s)

    def reset_prefix_cache(self, timeout_s: float | None) -> int:
        """How many blocks lost their hash."""
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
    """gRPC says that a method is unknown, and not that it is another service's server."""
    try:
        with clear_errors(target):
            yield
    except QuireError as error:
        if error.code is not grpc.StatusCode.UNIMPLEMENTED:
            raise
        raise QuireError(error.code, f"no scheduler at {target}") from error
