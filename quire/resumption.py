"""One unbroken stream out of several that broke: what the client has, and what to ask for next."""

from collections.abc import Sequence
from typing import TypeAlias

import grpc

from quire.errors import QuireError
from quire.outputs import CompletionDelta, RequestDelta
from quire.patience import Patience, is_final
from quire.v1 import inference_pb2

Ask: TypeAlias = inference_pb2.StreamGenerateRequest | inference_pb2.ResumeGenerateRequest
Answer: TypeAlias = inference_pb2.StreamGenerateResponse | inference_pb2.ResumeGenerateResponse


class Resumption:
    """The state of one request's stream. It does nothing itself; a client asks by it, tells it
    every message and every failure, and passes on what it gives.

    `request` is None for a request that another client began, of which this one has the tokens
    below `next_token_indices`.
    """

    def __init__(
        self,
        patience: Patience,
        request_id: str,
        request: inference_pb2.StreamGenerateRequest | None = None,
        next_token_indices: Sequence[int] = (),
    ) -> None:
        self.patience = patience
        self.request_id = request_id
        # The usage has come, and with it everything.
        self.is_complete = False
        self._request = request
        self._is_accepted = request is None
        # The caller has been told that it is accepted.
        self._is_told = False
        # Per choice: the index of its next token, and whether its end has come.
        self._next = list(next_token_indices)
        self._ended: set[int] = set()
        # The server has said how it ended, or refused it.
        self._is_final = False

    def ask(self) -> Ask:
        """What brings everything that the client does not have yet."""
        if self._request is not None and not self._is_accepted:
            return self._request
        return inference_pb2.ResumeGenerateRequest(
            request_id=self.request_id, next_token_indices=self._next
        )

    def take(self, message: Answer) -> RequestDelta | None:
        """What of a message the caller does not know yet; None if there is nothing.

        QuireError where tokens are missing: the stream is broken.
        """
        delta = RequestDelta.from_proto(message)
        outputs = [output for output in delta.outputs if self._is_new(output)]
        for output in outputs:
            self._note(output)
        self._is_accepted = True
        self.is_complete = self.is_complete or delta.usage is not None
        if self._is_told and not outputs and delta.usage is None:
            return None
        self._is_told = True
        self.patience.progress()
        return RequestDelta(delta.request_id, delta.model, outputs, delta.usage)

    def failed(self, error: QuireError) -> float:
        """Seconds to wait until the next try. Raises the error if it is final."""
        lost = error.code is grpc.StatusCode.NOT_FOUND and self._may_begin_anew
        if lost:
            self._is_accepted = False
        self._is_final = is_final(error) and not lost
        return self.patience.failed(error, resumable=lost)

    def ended(self) -> None:
        """The server has ended the stream without an error."""
        self._is_final = True

    @property
    def runs_unheard(self) -> bool:
        """Without a call to cancel, the request may run for nobody: it is to be cancelled by its
        id. One that has a window is left for whoever resumes it, as is one of another client."""
        return not (
            self.is_complete
            or self._is_final
            or self._request is None
            or self._request.resume_window_s
        )

    @property
    def _may_begin_anew(self) -> bool:
        """A request that no token has come of can be begun again as if nothing had been."""
        return self._request is not None and not any(self._next) and not self._ended

    def _is_new(self, output: CompletionDelta) -> bool:
        """False for what the caller has whole."""
        if output.index in self._ended:
            return False
        have = self._have(output.index)
        first, end = output.first_token_index, output.first_token_index + len(output.token_ids)
        if not output.token_ids or first == have:
            return True
        if end <= have and output.finish_reason is None:
            return False
        # Its text cannot be cut where the tokens are: another answer begins where it should.
        message = f"choice {output.index}: tokens {first} to {end - 1} came, {have} was next"
        raise QuireError(grpc.StatusCode.INTERNAL, message, resumable=True)

    def _note(self, output: CompletionDelta) -> None:
        have = self._have(output.index)
        self._next.extend([0] * (output.index + 1 - len(self._next)))
        self._next[output.index] = have + len(output.token_ids)
        if output.finish_reason is not None:
            self._ended.add(output.index)

    def _have(self, index: int) -> int:
        return self._next[index] if index < len(self._next) else 0
