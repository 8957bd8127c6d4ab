"""What waits to be said to the scheduler: gathered for a moment, in bounded frames."""

import asyncio
from collections import deque

from quire.internal.v1 import scheduler_pb2
from quire.service.channels import INTERNAL_MESSAGE_BYTES
from quire.service.errors import invalid

# A frame beyond the link's limit would end the link, and with it everybody's requests. A quarter
# leaves room for the few bytes around each part, which are not counted.
FRAME_BYTES = INTERNAL_MESSAGE_BYTES // 4
# Requests that come at once come some tenths of a millisecond apart, and a frame for each costs
# both sides more than the requests do. So a frame goes no sooner than this behind the one before.
FRAME_INTERVAL_S = 0.005

_Part = (
    scheduler_pb2.Submission
    | scheduler_pb2.Attachment
    | scheduler_pb2.Finish
    | scheduler_pb2.Detachment
    | scheduler_pb2.Cancellation
)


class Outbox:
    """Gathers parts into frames, in their order. The next turn of the loop sends a frame, or, where
    one went a moment ago, what has come until `FRAME_INTERVAL_S` behind it.
    """

    def __init__(self) -> None:
        self._full = deque[scheduler_pb2.ConnectRequest]()
        self._frame = scheduler_pb2.ConnectRequest()
        self._num_bytes = 0
        self._filled = asyncio.Event()
        self._is_closed = False
        # On the loop's clock; when the next frame may go.
        self._next_at = 0.0

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
        if not self._full:
            await self._gather()
        if self._full:
            return self._full.popleft()
        if self._is_closed and not self._num_bytes:
            return None
        if not self._is_closed:
            self._filled.clear()
        self._next_at = asyncio.get_running_loop().time() + FRAME_INTERVAL_S
        return self._begin_frame()

    async def _gather(self) -> None:
        """A frame that is there alone, with nothing sent just before it, does not wait."""
        left_s = self._next_at - asyncio.get_running_loop().time()
        if left_s > 0 and not self._is_closed:
            await asyncio.sleep(left_s)

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
