"""Many requests over one stream: an attachment number each, and what is said under it."""

import asyncio
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import grpc
import structlog
from google.rpc import error_details_pb2

from gateway_svc.logprobs import MisfitError, logprobs_of
from gateway_svc.outbox import Outbox, check_size
from gateway_svc.request_stream import Ended, NewTokens, RequestStream, Wanted
from quire.internal.v1 import gateway_pb2, scheduler_pb2
from quire.service.errors import RequestError, unavailable

log = structlog.get_logger()

_CODES = {code.value[0]: code for code in grpc.StatusCode}
# What a scheduler answers that can do nothing now; another one can, or the same one soon.
_PASSING = frozenset({"REDIS_AWAY", "LEAD_ENDS", "STANDBY"})
_RETRY_S = 0.25
# A scheduler that leaves tokens out again and again is at fault.
_MAX_GAPS = 3


@dataclass(frozen=True)
class _Cancelling:
    """Somebody waits to hear whether a request of this id was live."""

    key: scheduler_pb2.RequestKey
    answer: asyncio.Future[bool]


class Multiplexer:
    """The requests of this gateway that are live at the scheduler, whichever leads.

    While no scheduler is there requests wait, and are submitted again when one is. Whoever has
    waited `wait_s` fails. Everything runs on the loop's thread, and a frame is delivered without
    a pause.
    """

    def __init__(
        self,
        max_queued_tokens: int,
        wait_s: float,
        on_reattached: Callable[[], object] = lambda: None,
    ) -> None:
        self.outbox = Outbox()
        # A scheduler listens.
        self.is_open = False
        self._max_queued_tokens = max_queued_tokens
        self._wait_s = wait_s
        self._on_reattached = on_reattached
        self._numbers = itertools.count(1)
        # By their latest attachment numbers, which grow: in order of attachment.
        self._streams: dict[int, RequestStream] = {}
        # By their tags.
        self._cancellations: dict[int, _Cancelling] = {}

    @property
    def is_idle(self) -> bool:
        return not self._streams and not self._cancellations

    # The link

    def open(self) -> None:
        """A scheduler listens: everything that is live is asked for again, in its order."""
        self.outbox = Outbox()
        self.is_open = True
        for stream in list(self._streams.values()):
            self._attach(stream)
        for tag, cancelling in self._cancellations.items():
            self.outbox.cancel(scheduler_pb2.Cancellation(request=cancelling.key, tag=tag))

    def lose(self) -> None:
        """Nobody listens. What was to be said is forgotten, for it can be said again."""
        self.is_open = False
        self.outbox = Outbox()
        for stream in self._streams.values():
            self._await_scheduler(stream)

    def detach_all(self, error: RequestError) -> None:
        """Ends every stream with `error`; the requests run on, for others to go on with."""
        for stream in list(self._streams.values()):
            self.release(stream)
            stream.fail(error)
        for cancelling in self._cancellations.values():
            if not cancelling.answer.done():
                cancelling.answer.set_exception(error)

    # Requests

    def submit(
        self,
        submission: scheduler_pb2.Submission,
        state: gateway_pb2.StreamState,
        on_overflow: Callable[[], object],
    ) -> RequestStream:
        """Gives the scheduler a request, now or when one is there. RequestError if no frame could
        hold it."""
        check_size(submission)
        return self._follow(submission, state, on_overflow)

    def attach(
        self, attachment: scheduler_pb2.Attachment, on_overflow: Callable[[], object]
    ) -> RequestStream:
        """Takes over the stream of a request from its first token on."""
        return self._follow(attachment, None, on_overflow)

    def finish(self, stream: RequestStream, choice: int, num_tokens: int) -> None:
        """Ends a choice at a stop string, unless it has ended; its end is told like any other."""
        if stream.attachment in self._streams and stream.is_live(choice):
            stream.finishes[choice] = num_tokens
            if self.is_open:
                self._say_finish(stream, choice)

    def leave(self, stream: RequestStream) -> None:
        """The client has gone: the request is cancelled, unless it may be resumed or all of it has
        ended. Without a scheduler it becomes an orphan of the next one, which ends it in time:
        by then it may be another gateway's.
        """
        if not self._forget(stream):
            return
        if stream.state is None or stream.state.resume_window_s:
            detachment = scheduler_pb2.Detachment(attachment=stream.attachment, client_gone=True)
            self.outbox.detach(detachment)
        else:
            self.outbox.cancel(scheduler_pb2.Cancellation(attachment=stream.attachment))

    def release(self, stream: RequestStream) -> None:
        """Lets go of a request whose client may still want it."""
        if self._forget(stream):
            self.outbox.detach(scheduler_pb2.Detachment(attachment=stream.attachment))

    async def cancel(self, request_id: str) -> bool:
        """Cancels a request of any gateway; False if no such one is live."""
        tag = next(self._numbers)
        key = scheduler_pb2.RequestKey(request_id=request_id)
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._cancellations[tag] = _Cancelling(key, answer)
        if self.is_open:
            self.outbox.cancel(scheduler_pb2.Cancellation(request=key, tag=tag))
        try:
            async with asyncio.timeout(self._wait_s):
                return await answer
        except TimeoutError:
            raise _away(was_accepted=False) from None
        finally:
            del self._cancellations[tag]

    # Frames

    def deliver(self, frame: scheduler_pb2.ConnectResponse) -> None:
        """Parts of requests that this gateway has left are dropped."""
        # What comes with an acceptance was there before it.
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
            cancelling = self._cancellations.get(result.tag)
            if cancelling is not None and not cancelling.answer.done():
                cancelling.answer.set_result(result.found)

    def _deliver_tokens(self, deltas: scheduler_pb2.TokenDeltas, accepted: set[int]) -> None:
        try:
            logprobs = logprobs_of(deltas)
        except MisfitError as misfit:
            self._refuse_tokens(deltas, str(misfit))
            return
        token_ids = tuple(deltas.token_ids)
        entries = zip(
            deltas.attachments,
            deltas.choices,
            deltas.first_indices,
            deltas.num_tokens,
            logprobs,
            strict=True,
        )
        start = 0
        for attachment, choice, first_index, count, its_logprobs in entries:
            if stream := self._streams.get(attachment):
                its_ids = token_ids[start : start + count]
                new = NewTokens(choice, first_index, its_ids, its_logprobs)
                self._put(stream, new, is_replayed=attachment in accepted)
            start += count

    def _refuse_tokens(self, deltas: scheduler_pb2.TokenDeltas, why: str) -> None:
        """As if they had not come."""
        log.warning("log-probabilities do not fit their tokens", reason=why)
        for attachment in deltas.attachments:
            if stream := self._streams.get(attachment):
                self._miss(stream)

    def _deliver_ends(self, ends: Iterable[scheduler_pb2.ChoiceEnd]) -> None:
        """A request is forgotten with the end of its last choice."""
        for end in ends:
            if stream := self._streams.get(end.attachment):
                self._put(stream, _ended(end))
                if stream.has_ended:
                    self._forget(stream)

    def _put(
        self, stream: RequestStream, event: NewTokens | Ended, is_replayed: bool = False
    ) -> None:
        if not stream.put(event, is_replayed):
            log.warning("tokens are missing", choice=event.choice, gaps=stream.num_gaps + 1)
            self._miss(stream)

    def _miss(self, stream: RequestStream) -> None:
        """Asks for the stream again, from what it has on."""
        stream.num_gaps += 1
        if stream.num_gaps > _MAX_GAPS:
            self.release(stream)
            stream.fail(RequestError(grpc.StatusCode.INTERNAL, "internal error"))
        else:
            self._attach(stream)

    def _deliver_failure(
        self, stream: RequestStream, failure: scheduler_pb2.RequestFailure
    ) -> None:
        error = _error(failure)
        if _reason(error) in _PASSING:
            number = stream.attachment
            self._await_scheduler(stream)
            asyncio.get_running_loop().call_later(_RETRY_S, self._attach_again, number)
        else:
            self._forget(stream)
            stream.fail(error)

    # One stream

    def _follow(
        self,
        wanted: Wanted,
        state: gateway_pb2.StreamState | None,
        on_overflow: Callable[[], object],
    ) -> RequestStream:
        def overflowed() -> None:
            self.release(stream)
            on_overflow()

        stream = RequestStream(wanted, state, self._max_queued_tokens, overflowed)
        if self.is_open:
            self._attach(stream)
        else:
            self._number(stream)
            self._await_scheduler(stream)
        return stream

    def _attach_again(self, number: int) -> None:
        """Unless it has been left, or attached over another link, meanwhile."""
        if self.is_open and (stream := self._streams.get(number)):
            self._attach(stream)

    def _attach(self, stream: RequestStream) -> None:
        """Asks for a stream, from what it has on, under a new number."""
        self._number(stream)
        self._await_scheduler(stream)
        wanted = stream.wanted
        del wanted.next_indices[:]
        wanted.next_indices.extend(stream.next_indices)
        if isinstance(wanted, scheduler_pb2.Submission):
            # What was not accepted may bear the id of one that was cancelled before.
            wanted.again = stream.was_accepted
            self.outbox.submit(wanted)
        else:
            self.outbox.attach(wanted)
        # Also those whose ends were told: another scheduler does not know of them.
        for choice in stream.finishes:
            self._say_finish(stream, choice)
        if stream.was_sent:
            self._on_reattached()
        stream.was_sent = True

    def _number(self, stream: RequestStream) -> None:
        self._streams.pop(stream.attachment, None)
        stream.wanted.attachment = next(self._numbers)
        self._streams[stream.attachment] = stream

    def _await_scheduler(self, stream: RequestStream) -> None:
        stream.wait(self._wait_s, lambda: self._give_up(stream))

    def _give_up(self, stream: RequestStream) -> None:
        self.release(stream)
        stream.fail(_away(stream.was_accepted))

    def _forget(self, stream: RequestStream) -> bool:
        """True where the scheduler is there and has it."""
        stream.wait_no_more()
        was_live = self._streams.pop(stream.attachment, None) is not None
        return was_live and self.is_open

    def _say_finish(self, stream: RequestStream, choice: int) -> None:
        finish = scheduler_pb2.Finish(
            attachment=stream.attachment, choice=choice, num_tokens=stream.finishes[choice]
        )
        self.outbox.finish(finish)


def _ended(end: scheduler_pb2.ChoiceEnd) -> Ended:
    return Ended(
        choice=end.choice,
        reason=end.reason,
        stop_token_id=end.stop_token_id if end.HasField("stop_token_id") else None,
        num_tokens=end.num_tokens,
        num_cached_prompt_tokens=end.num_cached_prompt_tokens,
    )


def _error(failure: scheduler_pb2.RequestFailure) -> RequestError:
    code = _CODES.get(failure.code, grpc.StatusCode.UNKNOWN)
    return RequestError(code, failure.message, tuple(failure.details))


def _reason(error: RequestError) -> str:
    """Of the error's ErrorInfo; empty if it has none."""
    info = error_details_pb2.ErrorInfo()
    for detail in error.packed_details():
        if detail.Unpack(info):
            return str(info.reason)
    return ""


def _away(was_accepted: bool) -> RequestError:
    metadata = {"resumable": "true"} if was_accepted else None
    return unavailable("SCHEDULER_AWAY", "the scheduler is away", metadata=metadata)
