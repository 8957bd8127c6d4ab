"""Requests that are not accepted yet, by id, so that they can be cancelled meanwhile."""

from collections import Counter
from collections.abc import Iterable

from quire.internal.v1 import scheduler_pb2
from quire.service.errors import RequestError
from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.refusals import cancelled
from scheduler_svc.gateway.attachments import key_of
from scheduler_svc.gateway.connection import GatewayConnection
from scheduler_svc.store.requests import RequestKey


class PendingRequests:
    """Requests that are being recorded or wait for room. One that is cancelled ends as soon as it
    is accepted."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # Submissions in progress: several gateways may send the same request.
        self._counts = Counter[RequestKey]()
        self._cancelled: set[RequestKey] = set()

    def begin(self, key: RequestKey) -> None:
        """Note that a submission of a request is in progress, until `end`."""
        self._counts[key] += 1

    def end(self, keys: Iterable[RequestKey]) -> None:
        """Note that these submissions were accepted or refused."""
        for key in keys:
            self._counts[key] -= 1
            if not self._counts[key]:
                del self._counts[key]
                self._cancelled.discard(key)

    def cancel(self, key: RequestKey) -> bool:
        """Cancel a request as soon as it is accepted; False if no submission is in progress."""
        is_pending = key in self._counts
        if is_pending:
            self._cancelled.add(key)
        return is_pending

    def refuse_cancelled(
        self, submission: scheduler_pb2.Submission, connection: GatewayConnection
    ) -> bool:
        """Refuse a request that waits for room if it was cancelled; return whether it was."""
        is_cancelled = key_of(submission) in self._cancelled
        if is_cancelled:
            connection.reject(submission.attachment, cancelled())
        return is_cancelled

    def accepted(self, key: RequestKey) -> None:
        """Cancel a request that has just been accepted, if that is wanted."""
        group = self._engine.live.get(key)
        if key in self._cancelled and group is not None and group.error is None:
            self._engine.cancel(group)

    def reject(
        self,
        submission: scheduler_pb2.Submission,
        error: RequestError,
        connection: GatewayConnection,
    ) -> None:
        """Refuse a request. A cancelled one fails as such: its gateway would send it again, here or
        to another shard."""
        if not self.refuse_cancelled(submission, connection):
            connection.reject(submission.attachment, error)
