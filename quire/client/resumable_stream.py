"""Joins the streams of several calls for one request into one stream without gaps."""

from collections.abc import Sequence
from typing import TypeAlias

import grpc

from quire.client.errors import UNKNOWN_REQUEST, QuireError, UnavailableError
from quire.client.outputs import CompletionDelta, RequestDelta
from quire.client.retry_policy import RetryPolicy, is_final
from quire.v1 import inference_pb2

# The reason of a request that was cancelled, also by a gateway whose client had disconnected.
_CANCELLED = "CANCELLED"
# That of a call whose client has not taken what it was sent.
_SLOW_READER = "SLOW_READER"
StreamRequest: TypeAlias = inference_pb2.StreamGenerateRequest | inference_pb2.ResumeGenerateRequest
StreamResponse: TypeAlias = (
    inference_pb2.StreamGenerateResponse | inference_pb2.ResumeGenerateResponse
)
# A streaming call of asyncio. The classes cannot be subscripted at run time.
AioStream: TypeAlias = (
    "grpc.aio.UnaryStreamCall[inference_pb2.StreamGenerateRequest,"
    " inference_pb2.StreamGenerateResponse]"
    " | grpc.aio.UnaryStreamCall[inference_pb2.ResumeGenerateRequest,"
    " inference_pb2.ResumeGenerateResponse]"
)


_ABANDONED = (
    "the connection broke, and the server cancelled the request; "
    "a request with a resume_window_s goes on meanwhile, and can be resumed"
)


class ResumableStream:
    """The state of one request's stream. A client sends its requests, passes it every message and
    failure, and yields its deltas.

    `request` is None for a request of another client, whose tokens below `next_token_indices` have
    been received.
    """

    def __init__(
        self,
        retry_policy: RetryPolicy,
        request_id: str,
        request: inference_pb2.StreamGenerateRequest | None = None,
        next_token_indices: Sequence[int] = (),
    ) -> None:
        self.retry_policy = retry_policy
        self.request_id = request_id
        # The usage, which is last, has been received.
        self.is_complete = False
        self._request = request
        self._is_accepted = request is None
        # The acceptance has been yielded.
        self._is_reported = False
        # Per choice, the index of its next token.
        self._next = list(next_token_indices)
        # Choices whose end has been received.
        self._ended: set[int] = set()
        # The server has ended or refused the request.
        self._is_final = False
        # A connection has broken since the last message.
        self._has_broken = False

    def next_request(self) -> StreamRequest:
        """The request for everything that has not been received."""
        if self._request is not None and not self._is_accepted:
            return self._request
        return inference_pb2.ResumeGenerateRequest(
            request_id=self.request_id, next_token_indices=self._next
        )

    def take(self, message: StreamResponse) -> RequestDelta | None:
        """The new part of a message; None if there is none. QuireError if tokens are missing."""
        delta = RequestDelta.from_proto(message)
        has_prompt = self._have(0) > 0
        outputs = [output for output in delta.outputs if self._is_new(output)]
        for output in outputs:
            self._record(output)
        self._is_accepted = True
        self._has_broken = False
        self.is_complete = self.is_complete or delta.usage is not None
        if self._is_reported and not outputs and delta.usage is None:
            return None
        self._is_reported = True
        self.retry_policy.record_progress()
        of_prompt = None if has_prompt else delta.prompt_logprobs
        return RequestDelta(delta.request_id, delta.model, outputs, delta.usage, of_prompt)

    def backoff_s(self, error: QuireError) -> float:
        """Record a failure; return the delay of the retry. Raises the error if it is final, and
        UnavailableError if the request was cancelled because its connection broke."""
        is_abandoned = error.reason == _CANCELLED and self._has_broken and self._has_no_window
        if is_abandoned:
            error = UnavailableError(grpc.StatusCode.UNAVAILABLE, _ABANDONED)
        # An unknown model is NOT_FOUND, too.
        lost = (error.reason == UNKNOWN_REQUEST or is_abandoned) and self._can_restart
        if lost:
            self._is_accepted = False
        if error.resumable and error.reason in (None, _SLOW_READER):
            self._has_broken = True
        self._is_final = is_final(error) and not lost
        return self.retry_policy.backoff_s(error, resumable=lost)

    def mark_ended(self) -> None:
        """Record that the server has ended the stream without an error."""
        self._is_final = True

    @property
    def needs_cancel(self) -> bool:
        """Whether the request may be running without a call, so that it has to be cancelled by its
        id. Requests that have a window or are of another client can be resumed instead."""
        return not self.is_complete and not self._is_final and self._has_no_window

    @property
    def _has_no_window(self) -> bool:
        return self._request is not None and not self._request.resume_window_s

    @property
    def _can_restart(self) -> bool:
        """A request without a received token can be sent again."""
        return self._request is not None and not any(self._next) and not self._ended

    def _is_new(self, output: CompletionDelta) -> bool:
        """False if the output has been received completely."""
        if output.index in self._ended:
            return False
        have = self._have(output.index)
        first, end = output.first_token_index, output.first_token_index + len(output.token_ids)
        if not output.token_ids or first == have:
            return True
        if end <= have and output.finish_reason is None:
            return False
        # A text cannot be cut at a token, so the stream is resumed at the missing token.
        message = f"choice {output.index}: received tokens {first} to {end - 1}, expected {have}"
        raise QuireError(grpc.StatusCode.INTERNAL, message, resumable=True)

    def _record(self, output: CompletionDelta) -> None:
        have = self._have(output.index)
        self._next.extend([0] * (output.index + 1 - len(self._next)))
        self._next[output.index] = have + len(output.token_ids)
        if output.finish_reason is not None:
            self._ended.add(output.index)

    def _have(self, index: int) -> int:
        return self._next[index] if index < len(self._next) else 0
