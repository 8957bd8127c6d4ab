"""Multiplexes the requests of one shard over one stream, each under an attachment number."""

import asyncio
import itertools
from collections.abc import Callable, Iterable

import grpc
import structlog

from gateway_svc.scheduler import events
from gateway_svc.scheduler.id_queries import IdQueries, Query
from gateway_svc.scheduler.request_stream import RequestStream
from gateway_svc.scheduler.send_queue import SendQueue, check_size
from quire.internal.v1 import gateway_pb2, scheduler_pb2
from quire.service.errors import RequestError, unavailable

log = structlog.get_logger()

# Failures of a scheduler that cannot serve now. Another one can, or the same one later.
_TRANSIENT_REASONS = frozenset({"REDIS_AWAY", "LEAD_ENDS", "STANDBY"})
_RETRY_S = 0.25
# A request with more consecutive gaps in its tokens fails.
_MAX_GAPS = 3


class Multiplexer:
    """The requests of this gateway that are live at the leader of one shard.

    While no leader is connected requests wait, and are sent again to the next one. A request
    that has waited `wait_s` fails. Everything runs on the event loop's thread, and a frame is
    delivered without yielding to the loop.
    """

    def __init__(
        self,
        max_queued_tokens: int,
        wait_s: float,
        on_reattached: Callable[[], object],
        on_failure: Callable[[RequestStream, RequestError], RequestError | None],
    ) -> None:
        """`on_failure` is called with a stream that was removed after a failure. It returns the
        error that the stream fails with, or None if the stream continues at another shard."""
        self.send_queue = SendQueue()
        # A scheduler is connected.
        self.is_connected = False
        # Of all streams.
        self.num_sequences = 0
        self._max_queued_tokens = max_queued_tokens
        self._wait_s = wait_s
        self._on_reattached = on_reattached
        self._on_failure = on_failure
        self._numbers = itertools.count(1)
        # By their latest attachment numbers, which grow: in order of attachment.
        self._streams: dict[int, RequestStream] = {}
        self._queries = IdQueries()

    @property
    def is_idle(self) -> bool:
        return not self._streams and not self._queries

    @property
    def streams(self) -> list[RequestStream]:
        return list(self._streams.values())

    @property
    def num_accepted_sequences(self) -> int:
        """Of the streams whose requests were accepted."""
        return sum(one.num_sequences for one in self._streams.values() if one.was_accepted)

    def on_connected(self) -> None:
        """Send all live requests, cancellations and lookups again, in their order."""
        self.send_queue = SendQueue()
        self.is_connected = True
        for stream in self.streams:
            self._attach(stream)
        for query in self._queries:
            self._send_query(query)

    def on_disconnected(self) -> None:
        """Start the timeouts of all requests and discard unsent parts, which `on_connected` sends
        again.
        """
        self.is_connected = False
        self.send_queue = SendQueue()
        for stream in self._streams.values():
            self._start_timeout(stream)

    def detach_all(self, error: RequestError) -> None:
        """End every stream with `error`; the requests run on and can be resumed elsewhere."""
        for stream in self.streams:
            self.detach(stream)
            stream.fail(error)
        self._queries.fail_all(error)

    def submit(
        self,
        submission: scheduler_pb2.Submission,
        state: gateway_pb2.ResumeState,
        on_overflow: Callable[[], object],
    ) -> RequestStream:
        """Submit a request, now or when a scheduler is connected. RequestError if it exceeds the
        size of a frame.
        """
        check_size(submission)
        return self._add(RequestStream(submission, state, self._max_queued_tokens, on_overflow))

    def attach(
        self, attachment: scheduler_pb2.Attachment, on_overflow: Callable[[], object]
    ) -> RequestStream:
        """Take over the stream of a request, from its first token."""
        return self._add(RequestStream(attachment, None, self._max_queued_tokens, on_overflow))

    def adopt(self, stream: RequestStream) -> None:
        """Continue a stream that no other shard has, as after a reconnect."""
        if self.is_connected:
            self._attach(stream)
        else:
            self._assign_number(stream)
            self._start_timeout(stream)

    def finish(self, stream: RequestStream, choice: int, num_tokens: int) -> None:
        """End a live choice where its text ends; the scheduler confirms the end."""
        if stream.attachment in self._streams and stream.is_live(choice):
            stream.finishes[choice] = num_tokens
            if self.is_connected:
                self._send_finish(stream, choice)

    def close(self, stream: RequestStream) -> None:
        """Close the stream of a disconnected client: cancel the request, or detach from it if
        it may be resumed. No effect once the request has ended. The client of a response in the
        background is not gone: it retrieves the response later.

        Without a scheduler nothing is sent: the next leader ends the request as an orphan, unless
        another gateway has attached to it by then.
        """
        if not self._remove(stream):
            return
        if stream.state is None or stream.state.resume_window_s:
            is_gone = stream.state is None or not stream.state.http.background
            detachment = scheduler_pb2.Detachment(attachment=stream.attachment, client_gone=is_gone)
            self.send_queue.detach(detachment)
        else:
            self.send_queue.cancel(scheduler_pb2.Cancellation(attachment=stream.attachment))

    def detach(self, stream: RequestStream) -> None:
        """Detach from a request that its client may still resume."""
        if self._remove(stream):
            self.send_queue.detach(scheduler_pb2.Detachment(attachment=stream.attachment))

    async def cancel(self, request_id: str, principal: str = "") -> bool:
        """Cancel a request of any gateway; return whether one of this id was live."""
        key = scheduler_pb2.RequestKey(principal=principal, request_id=request_id)
        return await self._ask(scheduler_pb2.Cancellation(request=key, tag=next(self._numbers)))

    async def look_up(self, request_id: str, principal: str = "") -> bool:
        """Return whether the shard has a request of this id, live or ended."""
        key = scheduler_pb2.RequestKey(principal=principal, request_id=request_id)
        return await self._ask(scheduler_pb2.Lookup(request=key, tag=next(self._numbers)))

    async def _ask(self, query: Query) -> bool:
        try:
            return await self._queries.ask(query, self._send_query, self._wait_s)
        except TimeoutError:
            raise scheduler_unavailable() from None

    def _send_query(self, query: Query) -> None:
        if not self.is_connected:
            return
        if isinstance(query, scheduler_pb2.Lookup):
            self.send_queue.look_up(query)
        else:
            self.send_queue.cancel(query)

    def deliver(self, frame: scheduler_pb2.ConnectResponse) -> None:
        """Deliver a frame to its streams; parts of removed streams are dropped."""
        # Tokens in the frame of their stream's acceptance are replayed.
        accepted = {acceptance.attachment for acceptance in frame.acceptances}
        for acceptance in frame.acceptances:
            if stream := self._streams.get(acceptance.attachment):
                stream.accept(acceptance)
        self._deliver_tokens(frame.deltas, accepted)
        self._deliver_ends(frame.choice_ends)
        for failure in frame.failures:
            if stream := self._streams.get(failure.attachment):
                self._deliver_failure(stream, failure)
        for result in frame.cancellation_results:
            self._queries.resolve(result.tag, result.found)
        for found in frame.lookup_results:
            self._queries.resolve(found.tag, found.found)

    def _deliver_tokens(self, deltas: scheduler_pb2.TokenDeltas, accepted: set[int]) -> None:
        try:
            decoded = events.decode_tokens(deltas)
        except events.LogprobsMismatchError as mismatch:
            self._reject_tokens(deltas, str(mismatch))
            return
        for attachment, new in decoded:
            if stream := self._streams.get(attachment):
                self._put(stream, new, is_replayed=attachment in accepted)

    def _reject_tokens(self, deltas: scheduler_pb2.TokenDeltas, reason: str) -> None:
        """Treat the tokens as missing."""
        log.warning("log-probabilities do not match their tokens", reason=reason)
        for attachment in deltas.attachments:
            if stream := self._streams.get(attachment):
                self._request_missing(stream)

    def _deliver_ends(self, ends: Iterable[scheduler_pb2.ChoiceEnd]) -> None:
        """Deliver ends; a stream is removed with the end of its last choice."""
        for end in ends:
            if stream := self._streams.get(end.attachment):
                self._put(stream, events.decode_end(end))
                if stream.has_ended:
                    self._remove(stream)

    def _put(
        self, stream: RequestStream, event: events.ChoiceEvent, is_replayed: bool = False
    ) -> None:
        if not stream.put(event, is_replayed):
            log.warning(
                "tokens are missing",
                choice=event.choice,
                gaps=stream.num_gaps + 1,
                **stream.log_fields,
            )
            self._request_missing(stream)
        elif stream.error is not None:
            # Its queue has overflowed.
            self.detach(stream)

    def _request_missing(self, stream: RequestStream) -> None:
        """Attach again from the next expected tokens; fail the stream after `_MAX_GAPS`."""
        stream.num_gaps += 1
        if stream.num_gaps > _MAX_GAPS:
            self.detach(stream)
            stream.fail(RequestError(grpc.StatusCode.INTERNAL, "internal error"))
        else:
            self._attach(stream)

    def _deliver_failure(
        self, stream: RequestStream, failure: scheduler_pb2.RequestFailure
    ) -> None:
        error = events.decode_failure(failure)
        if error.info.reason in _TRANSIENT_REASONS:
            self._start_timeout(stream)
            asyncio.get_running_loop().call_later(_RETRY_S, self._retry, stream.attachment)
        else:
            # Its timeout is that of the next shard, too.
            self._forget(stream)
            final = self._on_failure(stream, error)
            if final is not None:
                stream.fail(final)

    def _add(self, stream: RequestStream) -> RequestStream:
        self.adopt(stream)
        return stream

    def _retry(self, number: int) -> None:
        """Attach again, unless the stream was removed or attached on another connection."""
        if self.is_connected and (stream := self._streams.get(number)):
            self._attach(stream)

    def _attach(self, stream: RequestStream) -> None:
        """Request a stream from its next expected tokens, under a new attachment number."""
        self._assign_number(stream)
        self._start_timeout(stream)
        request = stream.request
        del request.next_indices[:]
        request.next_indices.extend(stream.next_indices)
        if isinstance(request, scheduler_pb2.Submission):
            # Only if accepted: otherwise its id may be that of a request cancelled earlier.
            request.again = stream.was_accepted
            self.send_queue.submit(request)
        else:
            self.send_queue.attach(request)
        # Including those confirmed: a new leader may not have them.
        for choice in stream.finishes:
            self._send_finish(stream, choice)
        if stream.was_sent:
            self._on_reattached()
        stream.was_sent = True

    def _assign_number(self, stream: RequestStream) -> None:
        self._forget(stream)
        stream.request.attachment = next(self._numbers)
        self._streams[stream.attachment] = stream
        self.num_sequences += stream.num_sequences

    def _start_timeout(self, stream: RequestStream) -> None:
        stream.start_timeout(self._wait_s, lambda: self._on_timeout(stream))

    def _on_timeout(self, stream: RequestStream) -> None:
        self.detach(stream)
        stream.fail(scheduler_unavailable(is_resumable=stream.was_accepted))

    def _remove(self, stream: RequestStream) -> bool:
        """Return whether a connected scheduler has the stream."""
        stream.cancel_timeout()
        return self._forget(stream) and self.is_connected

    def _forget(self, stream: RequestStream) -> bool:
        """Return whether the stream was live here."""
        was_live = self._streams.pop(stream.attachment, None) is not None
        if was_live:
            self.num_sequences -= stream.num_sequences
        return was_live

    def _send_finish(self, stream: RequestStream, choice: int) -> None:
        """Report that a choice ended in its text, with the number of tokens that it keeps."""
        finish = scheduler_pb2.Finish(
            attachment=stream.attachment, choice=choice, num_tokens=stream.finishes[choice]
        )
        self.send_queue.finish(finish)


def scheduler_unavailable(is_resumable: bool = False) -> RequestError:
    metadata = {"resumable": "true"} if is_resumable else None
    return unavailable("SCHEDULER_AWAY", "no scheduler is available", metadata=metadata)
