"""`LeadershipService`: lets standbys watch this process's hold of a lease."""

from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import grpc
from grpc import StatusCode

from quire.internal.v1 import leadership_pb2, leadership_pb2_grpc
from quire.service.errors import abort, failed
from scheduler_svc.store.leadership import LeaseStore

_Context = grpc.aio.ServicerContext[Any, Any]


class LeadershipServicer(leadership_pb2_grpc.LeadershipServiceServicer):
    """Knows the leases of all shards."""

    def __init__(self, leases: Callable[[], Iterable[LeaseStore]]) -> None:
        self._leases = leases

    async def Watch(  # noqa: N802
        self, request: leadership_pb2.WatchRequest, context: _Context
    ) -> AsyncIterator[leadership_pb2.WatchResponse]:
        lease = next((one for one in self._leases() if one.is_own(request.holder)), None)
        if lease is None:
            message = "this process is not the holder"
            await abort(context, failed(StatusCode.FAILED_PRECONDITION, "NOT_HOLDER", message))
        yield leadership_pb2.WatchResponse()
        await lease.wait_given_up(request.holder)
