"""What waits to be said to the scheduler: what one turn of the loop gives, in bounded frames."""

import asyncio
from collections import deque

from quire.internal.v1 import scheduler_pb2
from quire.service.channels import INTERNAL_MESSAGE_BYTES
from quire.service.errors import invalid

# A frame beyond the link's limit would end the link, and with it everybody's requests. A quarter
# leaves room for the few bytes around each part, which are not counted.
FRAME_BYTES = INTERNAL_MESSAGE_BYTES // 4

_Part = (
    scheduler_pb2.Submission
    | scheduler_pb2.Attachment
    | scheduler_pb2.Finish
    | scheduler_pb2.Detachment
    | scheduler_pb2.Cancellation
)


class Outbox:
    """Gathers parts into frames, in their order; the next turn of the loop sends them."""

    def __init__(self) -> None:
        self._full = deque[scheduler_pb2.ConnectRequest]()
        self._frame = scheduler_pb2.ConnectRequest()
        self._num_bytes = 0
        self._filled = asyncio.Event()
        self._is_closed = False

    def submit(self, submission: scheduler_pb2.Submission) -> None:
        """One that `check_size` has passed."""
        self._frame_for(submission).submissions.append(submission)

    def attach(self, attachment: scheduler_pb2.Attachment) -> None:
        self._frame_for(attachment).attachments.append(attachment)

    def finish(self, finish: scheduler_pb2.Finish) -> None:
        self._frame_for(finish).finishes.append(finish)

    def detach(self, detachment: scheduler_pb2.Detachment) -> None:
        self._frame_for(detachment).detachments.append(detachment)

    def cancel(self, cancellation: scheduler_pb2.Cancellation) -> None:
        self._frame_for(cancellation).cancellations.append(cancellation)

    def close(self) -> None:
        """Nothing is added from here on."""
        self._is_closed = True
        self._filled.set()

    async def take(self) -> scheduler_pb2.ConnectRequest | None:
        """The next frame to send; waits until there is one. None behind the last one."""
        await self._filled.wait()
        if self._full:
            return self._full.popleft()
        if self._is_closed and not self._num_bytes:
            return None
        if not self._is_closed:
            self._filled.clear()
        return self._begin_frame()

    def _frame_for(self, part: _Part) -> scheduler_pb2.ConnectRequest:
        num_bytes = part.ByteSize()
        if self._num_bytes + num_bytes > FRAME_BYTES:
            self._full.append(self._begin_frame())
        self._num_bytes += num_bytes
        self._filled.set()
        return self._frame

    def _begin_frame(self) -> scheduler_pb2.ConnectRequest:
        """Returns the frame that was added to until now."""
        frame, self._frame = self._frame, scheduler_pb2.ConnectRequest()
        self._num_bytes = 0
        return frame


def check_size(submission: scheduler_pb2.Submission) -> None:
    """RequestError if no frame could hold it."""
    num_bytes = submission.ByteSize()
    if num_bytes > FRAME_BYTES:
        raise invalid(
            "prompt",
            "PROMPT_TOO_LONG",
            f"makes a message of {num_bytes} bytes; at most {FRAME_BYTES} are allowed",
        )
