"""One gateway's stream: all output for it is collected into the next frame."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from itertools import islice

from grpc import StatusCode

from quire.internal.v1 import scheduler_pb2
from quire.service.errors import RequestError, failed, unavailable
from scheduler_svc.core.request import Delivery, End, EndReason
from scheduler_svc.core.sequence import Group, NullSubscriber, Sequence
from scheduler_svc.gateway.frame import Frame, num_entries
from scheduler_svc.gateway.token_buffer import TokenBuffer, add_deliverable
from scheduler_svc.leadership.lease import LeaseExpired

# A gateway with this many unread new tokens, those of log-probabilities included, is disconnected:
# there is no other back-pressure.
MAX_PENDING_TOKENS = 1_000_000
# Replayed or buffered output starts a new frame after this many tokens: message size is limited.
LARGE_FRAME_TOKENS = 250_000

_SentLater = scheduler_pb2.Finish | scheduler_pb2.Detachment | scheduler_pb2.Cancellation

_REASONS = {
    EndReason.STOP_TOKEN: scheduler_pb2.END_REASON_STOP_TOKEN,
    EndReason.LENGTH: scheduler_pb2.END_REASON_LENGTH,
    EndReason.STOP_STRING: scheduler_pb2.END_REASON_STOP_STRING,
}


def leadership_ended(successor: str = "") -> RequestError:
    """A new error each time: a raised one keeps its traceback, and all objects in it, alive.
    `successor` is the address of the scheduler that should lead next, empty if it is unknown."""
    metadata = {"leader": successor} if successor else {}
    return unavailable("LEAD_ENDS", "this scheduler no longer leads", metadata=metadata)


class GatewayConnection:
    """The frames to one gateway, and the requests attached to it."""

    def __init__(self, epoch: int, may_send: Callable[[], Awaitable[None]]) -> None:
        """`may_send` waits until the lease is certainly held; LeaseExpired after its end."""
        self.attached: dict[int, Group] = {}
        # Requests that are not accepted yet, with what the gateway has sent about them since.
        self._waiting: dict[int, list[_SentLater]] = {}
        # Its gateway has disconnected; requests that it sent may still be in progress.
        self.is_disconnected = False
        self.epoch = epoch
        self._may_send = may_send
        # Oldest first; output is added to the last one.
        self._frames = deque([Frame(epoch)])
        self._buffer = TokenBuffer()
        # Tokens in the frames, replayed ones not counted.
        self._num_new_tokens = 0
        self._pending = asyncio.Event()
        self._closed = False
        self._error: RequestError | None = None

    async def frames(self) -> AsyncIterator[scheduler_pb2.ConnectResponse]:
        """Yield frames as they fill, until the connection is closed.

        Raises the error it was closed with; RESOURCE_EXHAUSTED if the gateway does not read.
        """
        while True:
            await self._pending.wait()
            self._pending.clear()
            if self._num_new_tokens > MAX_PENDING_TOKENS:
                raise failed(
                    StatusCode.RESOURCE_EXHAUSTED,
                    "TOO_SLOW",
                    "the gateway does not read its frames",
                )
            is_last, error = self._closed, self._error
            frames, self._num_new_tokens = self._frames, 0
            self._frames = deque([Frame(self.epoch)])
            while frames:
                try:
                    await self._may_send()
                except LeaseExpired:
                    raise leadership_ended() from None
                yield frames.popleft().complete()
            if error is not None:
                raise error
            if is_last:
                return

    def close(self, error: RequestError | None = None) -> None:
        """End the stream after the output so far."""
        self._closed, self._error = True, error
        self._pending.set()

    def send_hello(self, hello: scheduler_pb2.SchedulerHello) -> None:
        self._frame.hello.CopyFrom(hello)
        self._pending.set()

    def send_cluster(self, cluster: scheduler_pb2.ClusterState) -> None:
        self._frame.cluster.CopyFrom(cluster)
        self._pending.set()

    def attach(
        self,
        group: Group,
        attachment: int,
        next_indices: Iterable[int],
        tokens_per_frame: int = 1,
    ) -> None:
        """Subscribe to a request: replay its tokens from these indices on, then send new ones. They
        are buffered until a choice has `tokens_per_frame`; ends are sent at once."""
        group.subscriber, group.attachment = self, attachment
        group.tokens_per_frame = tokens_per_frame
        self.attached[attachment] = group
        self.replay(group, attachment, next_indices)
        if tokens_per_frame > 1:
            self._buffer.register(group)

    def replay(self, group: Group, attachment: int, next_indices: Iterable[int]) -> None:
        """Accept an attachment and replay the request's output so far."""
        self._begin_frame_if_large()
        is_of_this_shard, epoch, number = group.attachment_generation
        self._frame.acceptances.add(
            attachment=attachment,
            opaque=group.record.opaque,
            attachment_generation=scheduler_pb2.AttachmentGeneration(
                epoch=epoch, number=number, is_of_former_shard=not is_of_this_shard
            ),
        )
        for sequence in group.outputs:
            replayed = Delivery()
            add_deliverable(replayed, attachment, sequence, _at(next_indices, sequence.choice))
            self._frames[-1].add(replayed)
            if sequence.is_finished and sequence.end is not None:
                self._add_end(attachment, sequence, sequence.end)
        self._pending.set()

    @property
    def _frame(self) -> scheduler_pb2.ConnectResponse:
        return self._frames[-1].message

    # Requests that are not accepted yet, because they are recorded slowly or wait for room

    def begin_wait(self, attachment: int) -> None:
        self._waiting[attachment] = []

    def note_for_wait(self, sent: _SentLater) -> None:
        """Keep what was sent about a request, if it waits."""
        if sent.attachment in self._waiting:
            self._waiting[sent.attachment].append(sent)

    def is_wanted(self, attachment: int) -> bool:
        """Whether the gateway still wants a request that waits."""
        sent = self._waiting[attachment]
        has_left = any(not isinstance(one, scheduler_pb2.Finish) for one in sent)
        return not (self.is_disconnected or has_left)

    def end_wait(self, attachment: int) -> list[_SentLater]:
        """Return what was sent about the request while it waited, in order."""
        return self._waiting.pop(attachment)

    def unsubscribe(self, group: Group) -> None:
        self._remove(group)
        group.subscriber = NullSubscriber()

    def reject(self, attachment: int, error: RequestError, opaque: bytes = b"") -> None:
        """`opaque` is that of a request that has ended with the error."""
        self._frame.failures.add(
            attachment=attachment,
            code=error.code.value[0],
            message=error.message,
            details=error.packed_details(),
            opaque=opaque,
        )
        self._pending.set()

    def send_cancellation_result(self, tag: int, found: bool) -> None:
        self._frame.cancellation_results.add(tag=tag, found=found)
        self._pending.set()

    def send_lookup_result(self, tag: int, found: bool) -> None:
        self._frame.lookup_results.add(tag=tag, found=found)
        self._pending.set()

    # The Subscriber protocol

    def deliver(self, delivery: Delivery) -> None:
        self._add_new(self._buffer.add(delivery))
        if self._buffer.is_due:
            self._begin_frame_if_large()
            self._add_new(self._buffer.take_all())

    def _add_new(self, delivery: Delivery) -> None:
        if delivery.prompt_logprobs:
            # One by one, because together they may be larger than a message. They do not count as
            # unread: a request has them once, and no more than its own limit.
            for at in range(len(delivery.attachments)):
                self._begin_frame_if_large()
                self._add_to_frame(delivery.part([at]))
        else:
            self._add_to_frame(delivery)

    def _add_to_frame(self, delivery: Delivery) -> None:
        if delivery.token_ids:
            self._num_new_tokens += len(delivery.token_ids) + num_entries(delivery)
            self._frames[-1].add(delivery)
            self._pending.set()

    def _begin_frame_if_large(self) -> None:
        if self._frames[-1].num_tokens > LARGE_FRAME_TOKENS:
            self._frames.append(Frame(self.epoch))

    def ended(self, sequence: Sequence, end: End) -> None:
        self._add_new(self._buffer.take(sequence))
        self._add_end(sequence.group.attachment, sequence, end)
        if sequence.group.num_live == 0:
            self._remove(sequence.group)

    def failed(self, group: Group, error: RequestError) -> None:
        for sequence in group.outputs:
            self._add_new(self._buffer.take(sequence))
        self._remove(group)
        self.reject(group.attachment, error, group.record.opaque)

    def _remove(self, group: Group) -> None:
        self.attached.pop(group.attachment, None)
        self._buffer.remove(group.attachment)

    def _add_end(self, attachment: int, sequence: Sequence, end: End) -> None:
        self._frame.choice_ends.add(
            attachment=attachment,
            choice=sequence.choice,
            reason=_REASONS[end.reason],
            stop_token_id=end.stop_token_id,
            num_tokens=end.num_output_tokens,
            num_cached_prompt_tokens=sequence.num_cached_prompt_tokens,
        )
        self._pending.set()


def _at(indices: Iterable[int], choice: int) -> int:
    """The index of a choice; 0 where absent."""
    return next(islice(indices, choice, None), 0)
