"""Many requests over one stream: an attachment number each, and what is said under it."""

import asyncio
import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace

import grpc

from gateway_svc.outbox import Outbox
from gateway_svc.request_stream import Accepted, Ended, NewTokens, RequestStream
from quire.internal.v1 import scheduler_pb2
from quire.service.errors import RequestError

_CODES = {code.value[0]: code for code in grpc.StatusCode}


class Multiplexer:
    """The requests of this gateway that are live at the scheduler.

    Everything runs on the loop's thread, and a frame is delivered without a pause.
    """

    def __init__(self, max_queued_tokens: int, closed_by: RequestError) -> None:
        self.outbox = Outbox()
        self._max_queued_tokens = max_queued_tokens
        # Why nothing can be sent; None while the scheduler listens.
        self._closed_by: RequestError | None = closed_by
        self._numbers = itertools.count(1)
        self._streams: dict[int, RequestStream] = {}
        self._cancellations: dict[int, asyncio.Future[bool]] = {}

    @property
    def is_idle(self) -> bool:
        return not self._streams and not self._cancellations

    def open(self) -> None:
        self._closed_by = None

    def close(self, error: RequestError) -> None:
        """Ends all requests with `error`, and refuses others with it until opened again."""
        self._closed_by = error
        self.outbox = Outbox()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(replace(error))
        for answer in self._cancellations.values():
            if not answer.done():
                answer.set_exception(replace(error))

    def submit(
        self, submission: scheduler_pb2.Submission, on_overflow: Callable[[], object]
    ) -> RequestStream:
        """Sends a request, under an attachment number of its own. RequestError if it cannot."""
        self._require_open()
        num_choices = submission.n if submission.HasField("n") else 1
        stream = RequestStream(
            next(self._numbers), num_choices, self._max_queued_tokens, on_overflow
        )
        submission.attachment = stream.attachment
        self.outbox.submit(submission)
        self._streams[stream.attachment] = stream
        return stream

    def finish(self, stream: RequestStream, choice: int, num_tokens: int) -> None:
        """Ends a choice at a stop string, unless it has ended; its end is told like any other."""
        if stream.attachment in self._streams and stream.is_live(choice):
            finish = scheduler_pb2.Finish(
                attachment=stream.attachment, choice=choice, num_tokens=num_tokens
            )
            self.outbox.finish(finish)

    def leave(self, stream: RequestStream) -> None:
        """Cancels the request unless all of it has ended, and forgets it."""
        if self._streams.pop(stream.attachment, None) is not None:
            cancellation = scheduler_pb2.Cancellation(attachment=stream.attachment)
            self.outbox.cancel(cancellation)

    async def cancel(self, request_id: str) -> bool:
        """Cancels a request of any gateway; False if no such one is live."""
        self._require_open()
        tag = next(self._numbers)
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._cancellations[tag] = answer
        key = scheduler_pb2.RequestKey(request_id=request_id)
        self.outbox.cancel(scheduler_pb2.Cancellation(request=key, tag=tag))
        try:
            return await answer
        finally:
            del self._cancellations[tag]

    def deliver(self, frame: scheduler_pb2.ConnectResponse) -> None:
        """Parts of requests that this gateway has left are dropped."""
        for acceptance in frame.acceptances:
            if stream := self._streams.get(acceptance.attachment):
                stream.put(Accepted())
        self._deliver_tokens(frame.deltas)
        self._deliver_ends(frame.choice_ends)
        for failure in frame.failures:
            if stream := self._streams.pop(failure.attachment, None):
                stream.fail(_error(failure))
        for result in frame.cancellation_results:
            answer = self._cancellations.get(result.tag)
            if answer is not None and not answer.done():
                answer.set_result(result.found)

    def _deliver_tokens(self, deltas: scheduler_pb2.TokenDeltas) -> None:
        token_ids = tuple(deltas.token_ids)
        entries = zip(
            deltas.attachments,
            deltas.choices,
            deltas.first_indices,
            deltas.num_tokens,
            strict=True,
        )
        start = 0
        for attachment, choice, first_index, count in entries:
            if stream := self._streams.get(attachment):
                stream.put(NewTokens(choice, first_index, token_ids[start : start + count]))
            start += count

    def _deliver_ends(self, ends: Iterable[scheduler_pb2.ChoiceEnd]) -> None:
        """A request is forgotten with the end of its last choice."""
        for end in ends:
            if stream := self._streams.get(end.attachment):
                stream.put(_ended(end))
                if stream.has_ended:
                    del self._streams[end.attachment]

    def _require_open(self) -> None:
        if self._closed_by is not None:
            # A copy: an exception keeps the frames of every place that raised it.
            raise replace(self._closed_by)


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
