"""Queue of one request's events, between the scheduler connection and the client's call."""

import asyncio
from collections.abc import Callable

import grpc
import structlog
from google.protobuf.message import DecodeError

from gateway_svc.scheduler.events import Accepted, ChoiceEvent, Ended, Event, NewTokens
from gateway_svc.scheduler.route import Route
from quire.internal.v1 import gateway_pb2, scheduler_pb2
from quire.service.errors import RequestError, failed
from quire.service.tracing.context import TraceContext

log = structlog.get_logger()

StreamRequest = scheduler_pb2.Submission | scheduler_pb2.Attachment


class RequestStream:
    """A queue of the events of all choices of a request: each token once, in order, bounded by
    the number of tokens of all choices together.

    It outlives the connection: the indices received so far are stored, so that a new attachment
    resumes from them. After an overflow or a failure it raises an error and has no further events.
    """

    def __init__(
        self,
        request: StreamRequest,
        state: gateway_pb2.ResumeState | None,
        max_queued_tokens: int,
        on_overflow: Callable[[], object],
    ) -> None:
        """`state` is None for a request of another gateway, until the acceptance carries it."""
        self.request = request
        self.state: gateway_pb2.ResumeState | None = None
        self.error: RequestError | None = None
        self.route = Route()
        # The request has been sent to its shard, on this connection or an earlier one.
        self.was_sent = False
        self.was_accepted = False
        # By choice that ended in its text, as this gateway found, the number of tokens kept.
        self.finishes: dict[int, int] = {}
        # Consecutive gaps: times that tokens were missing since new ones were received.
        self.num_gaps = 0
        # The client receives the response when it is complete.
        self.is_deferred = (
            isinstance(request, scheduler_pb2.Submission) and request.deferred_delivery
        )
        # By choice, the index of the next expected token.
        self.next_indices: list[int] = []
        # The choices whose end has not been received.
        self._live_choices: set[int] = set()
        self._max_queued_tokens = max_queued_tokens
        self._on_overflow = on_overflow
        self._events: list[Event] = []
        # Tokens in `_events`, and those of them that count towards the bound.
        self._num_queued_tokens = 0
        self._num_bounded_tokens = 0
        # Tokens that the reader waits for; 0 for any event.
        self._min_tokens = 0
        # Of the reader that waits.
        self._ready: asyncio.Future[None] | None = None
        self._timeout: asyncio.TimerHandle | None = None
        self._on_timeout: Callable[[], object] = lambda: None
        if state is not None:
            self._init_choices(state)

    @property
    def attachment(self) -> int:
        return self.request.attachment

    @property
    def num_sequences(self) -> int:
        """Sequences of the request; 1 if another gateway submitted it."""
        if isinstance(self.request, scheduler_pb2.Submission):
            return max(1, self.request.n)
        return 1

    @property
    def log_fields(self) -> dict[str, str]:
        """What identifies the request in a record of the log outside its call."""
        fields = {"request_id": self.request.request_id}
        if isinstance(self.request, scheduler_pb2.Submission):
            context = TraceContext.parse(self.request.trace_context.traceparent)
            if context is not None:
                fields["trace_id"] = context.trace_id_hex
        return fields

    @property
    def has_ended(self) -> bool:
        """The ends of all choices have been received."""
        return self.state is not None and not self._live_choices

    def is_live(self, choice: int) -> bool:
        return choice in self._live_choices

    def start_timeout(self, timeout_s: float, on_timeout: Callable[[], object]) -> None:
        """Call `on_timeout` unless an event is received in time. A running timer is kept, and calls
        the new function."""
        self._on_timeout = on_timeout
        if self._timeout is None and self.error is None:
            loop = asyncio.get_running_loop()
            self._timeout = loop.call_later(timeout_s, lambda: self._on_timeout())

    def cancel_timeout(self) -> None:
        if self._timeout is not None:
            self._timeout.cancel()
            self._timeout = None

    def detach_from_shard(self) -> None:
        """Remove what is meaningful to the shard alone that has had the stream."""
        self.was_sent = False
        self.request.attachment = 0
        if self.request.HasField("attachment_generation"):
            # Epochs of different shards are not comparable. Without a generation it would count as
            # new, and take the request from a gateway on which the client has continued.
            self.request.attachment_generation.is_of_former_shard = True

    def accept(self, acceptance: scheduler_pb2.Acceptance) -> None:
        """Store the attachment generation for re-attachment, and the state of a request that
        another gateway submitted.
        """
        self.cancel_timeout()
        self.route.num_moves = 0
        self.request.attachment_generation.CopyFrom(acceptance.attachment_generation)
        if self.was_accepted:
            return
        self.was_accepted = True
        if self.state is None:
            try:
                self._init_choices(gateway_pb2.ResumeState.FromString(acceptance.opaque))
            except DecodeError:
                log.exception("cannot decode the resume state of a request", **self.log_fields)
                self.fail(RequestError(grpc.StatusCode.INTERNAL, "internal error"))
                return
        if self.error is None:
            self._queue(Accepted())

    def put(self, event: ChoiceEvent, is_replayed: bool = False) -> bool:
        """Queue an event. Returns False, without effect, where tokens are missing before it.

        Tokens already received are dropped, and so are events after the end of a choice. The bound
        counts neither replayed tokens, which are received at once, nor those of deferred delivery,
        which do not wait for a client to read.
        """
        self.cancel_timeout()
        if not self.is_live(event.choice):
            return True
        next_index = self.next_indices[event.choice]
        if isinstance(event, Ended):
            if event.num_tokens > next_index:
                return False
            self._live_choices.remove(event.choice)
            if self.error is None:
                self._queue(event)
            return True
        if event.first_index > next_index:
            return False
        num_received = next_index - event.first_index
        if new := event.token_ids[num_received:]:
            self.next_indices[event.choice] += len(new)
            self.num_gaps = 0
            if num_received:
                event = NewTokens(event.choice, next_index, new, event.logprobs[num_received:])
            self._put_tokens(event, is_replayed)
        return True

    def fail(self, error: RequestError) -> None:
        """End the stream with an error; events queued before it can still be read."""
        self.cancel_timeout()
        self.error = self.error or error
        self._notify_if_ready()

    async def get(self, min_tokens: int = 0) -> list[Event]:
        """Return all queued events, at least one. RequestError if the stream failed and the queue
        is empty.

        Waits until `min_tokens` tokens are queued, every choice has ended, or the stream failed.
        """
        self._min_tokens = min_tokens
        if not self._is_ready:
            self._ready = asyncio.get_running_loop().create_future()
            try:
                await self._ready
            finally:
                self._ready = None
        if not self._events and self.error is not None:
            raise self.error
        events, self._events = self._events, []
        self._num_queued_tokens = self._num_bounded_tokens = 0
        return events

    def _init_choices(self, state: gateway_pb2.ResumeState) -> None:
        self.state = state
        # A beam search is one choice, of steps.
        num_choices = 1 if state.HasField("search") else state.num_choices
        self.next_indices = [0] * num_choices
        self._live_choices = set(range(num_choices))

    def _put_tokens(self, new: NewTokens, is_replayed: bool) -> None:
        if self.error is not None:
            return
        self._num_queued_tokens += len(new.token_ids)
        if not (is_replayed or self.is_deferred):
            self._num_bounded_tokens += len(new.token_ids)
        if self._num_bounded_tokens > self._max_queued_tokens:
            self._overflow()
        else:
            self._queue(new)

    def _queue(self, event: Event) -> None:
        self._events.append(event)
        self._notify_if_ready()

    @property
    def _is_ready(self) -> bool:
        if self.error is not None:
            return True
        has_enough = self._num_queued_tokens >= self._min_tokens or self.has_ended
        return bool(self._events) and has_enough

    def _notify_if_ready(self) -> None:
        if self._ready is not None and not self._ready.done() and self._is_ready:
            self._ready.set_result(None)

    def _overflow(self) -> None:
        self._events.clear()
        self.fail(
            failed(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "SLOW_READER",
                f"more than {self._max_queued_tokens} tokens were queued for the client",
                metadata={"resumable": "true"},
            )
        )
        self._on_overflow()
