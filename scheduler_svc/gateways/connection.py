"""One gateway's stream: everything that is to be said to it gathers into the next frame."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from itertools import islice

from grpc import StatusCode

from quire.internal.v1 import scheduler_pb2
from quire.service.errors import RequestError, failed, unavailable
from scheduler_svc.core.sequence import Delivery, End, EndReason, Group, Nobody, Sequence
from scheduler_svc.gateways.frame import Frame, num_entries
from scheduler_svc.gateways.gathering import Gathering, add_delivered
from scheduler_svc.tenure import TenureOver

# A gateway that has not read this many new tokens, those of log-probabilities included, is cut off:
# it cannot be slowed down otherwise.
MAX_PENDING_TOKENS = 1_000_000
# What is said again, or was gathered, begins a frame of its own behind so many tokens: messages
# have a largest size.
LARGE_FRAME_TOKENS = 250_000

_REASONS = {
    EndReason.STOP_TOKEN: scheduler_pb2.END_REASON_STOP_TOKEN,
    EndReason.LENGTH: scheduler_pb2.END_REASON_LENGTH,
    EndReason.STOP_STRING: scheduler_pb2.END_REASON_STOP_STRING,
}


def lead_ends() -> RequestError:
    """A new one each time: what is raised holds the frames that it passed, and all in them."""
    return unavailable("LEAD_ENDS", "this scheduler leads no more")


class GatewayConnection:
    """The frames to one gateway, and the requests that are attached to it."""

    def __init__(self, epoch: int, may_send: Callable[[], Awaitable[None]]) -> None:
        """`may_send` returns when the lead is held for certain."""
        self.attached: dict[int, Group] = {}
        # Its gateway has gone; what it had asked for may still be on its way.
        self.is_gone = False
        self.epoch = epoch
        self._may_send = may_send
        # Oldest first; the last one fills.
        self._frames = deque([Frame(epoch)])
        self._gathering = Gathering()
        # In the frames, but for what is said again.
        self._num_new_tokens = 0
        self._pending = asyncio.Event()
        self._closed = False
        self._error: RequestError | None = None

    async def frames(self) -> AsyncIterator[scheduler_pb2.ConnectResponse]:
        """Frames as they fill, until the connection is closed.

        Raises the error it was closed with, RESOURCE_EXHAUSTED if a frame grew beyond its bound.
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
                except TenureOver:
                    raise lead_ends() from None
                yield frames.popleft().complete()
            if error is not None:
                raise error
            if is_last:
                return

    def close(self, error: RequestError | None = None) -> None:
        """Ends the stream behind what has been said so far."""
        self._closed, self._error = True, error
        self._pending.set()

    def say_hello(self, hello: scheduler_pb2.SchedulerHello) -> None:
        self._frame.hello.CopyFrom(hello)
        self._pending.set()

    def attach(
        self,
        group: Group,
        attachment: int,
        next_indices: Iterable[int],
        is_patient: bool = False,
    ) -> None:
        """Takes over a request's stream: its tokens from these indices on, then what comes. A
        patient one hears of that when there is enough of it, and of each end at once."""
        group.subscriber, group.attachment, group.is_patient = self, attachment, is_patient
        self.attached[attachment] = group
        self.replay(group, attachment, next_indices)
        if is_patient:
            self._gathering.add(group)

    def replay(self, group: Group, attachment: int, next_indices: Iterable[int]) -> None:
        """Accepts an attachment, and says again what there is of the request."""
        self._begin_frame_if_large()
        epoch, number = group.turn
        self._frame.acceptances.add(
            attachment=attachment,
            opaque=group.terms.opaque,
            turn=scheduler_pb2.Turn(epoch=epoch, number=number),
        )
        for sequence in group.sequences:
            again = Delivery()
            add_delivered(again, attachment, sequence, _at(next_indices, sequence.choice))
            self._frames[-1].add(again)
            if sequence.has_left and sequence.end is not None:
                self._add_end(attachment, sequence, sequence.end)
        self._pending.set()

    @property
    def _frame(self) -> scheduler_pb2.ConnectResponse:
        return self._frames[-1].message

    def let_go(self, group: Group) -> None:
        """Nobody hears of the request from here on."""
        self._forget(group)
        group.subscriber = Nobody()

    def reject(self, attachment: int, error: RequestError) -> None:
        self._frame.failures.add(
            attachment=attachment,
            code=error.code.value[0],
            message=error.message,
            details=error.packed_details(),
        )
        self._pending.set()

    def answer_cancellation(self, tag: int, found: bool) -> None:
        self._frame.cancellation_results.add(tag=tag, found=found)
        self._pending.set()

    # What sequences say to their subscriber

    def deliver(self, delivery: Delivery) -> None:
        self._say_new(self._gathering.hold(delivery))
        if self._gathering.is_due:
            self._begin_frame_if_large()
            self._say_new(self._gathering.take_all())

    def _say_new(self, delivery: Delivery) -> None:
        if delivery.token_ids:
            self._num_new_tokens += len(delivery.token_ids) + num_entries(delivery)
            self._frames[-1].add(delivery)
            self._pending.set()

    def _begin_frame_if_large(self) -> None:
        if self._frames[-1].num_tokens > LARGE_FRAME_TOKENS:
            self._frames.append(Frame(self.epoch))

    def ended(self, sequence: Sequence, end: End) -> None:
        self._say_new(self._gathering.take(sequence))
        self._add_end(sequence.group.attachment, sequence, end)
        if sequence.group.num_live == 0:
            self._forget(sequence.group)

    def failed(self, group: Group, error: RequestError) -> None:
        self._forget(group)
        self.reject(group.attachment, error)

    def _forget(self, group: Group) -> None:
        self.attached.pop(group.attachment, None)
        self._gathering.remove(group.attachment)

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
    """0 where absent."""
    return next(islice(indices, choice, None), 0)
