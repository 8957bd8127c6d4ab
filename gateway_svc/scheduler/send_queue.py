"""Queue of parts to send to the scheduler, batched into frames of bounded size."""

import asyncio
from collections import deque

from quire.internal.v1 import scheduler_pb2
from quire.service.channels import INTERNAL_MESSAGE_BYTES
from quire.service.errors import invalid

# A frame beyond the message limit would end the stream of all requests. A quarter of the limit
# leaves room for the few bytes of framing around each part, which are not counted.
FRAME_BYTES = INTERNAL_MESSAGE_BYTES // 4
# Minimum time between two frames. Concurrent requests are submitted some tenths of a millisecond
# apart, and a frame for each would cost both sides more than the requests do.
FRAME_INTERVAL_S = 0.005

_Part = (
    scheduler_pb2.Submission
    | scheduler_pb2.Attachment
    | scheduler_pb2.Finish
    | scheduler_pb2.Detachment
    | scheduler_pb2.Cancellation
    | scheduler_pb2.Lookup
)


class SendQueue:
    """Batches parts into frames, in order. A frame is due at the next iteration of the event loop,
    and no sooner than `FRAME_INTERVAL_S` after the previous one.
    """

    def __init__(self) -> None:
        self._full_frames = deque[scheduler_pb2.ConnectRequest]()
        self._frame = scheduler_pb2.ConnectRequest()
        self._num_bytes = 0
        self._ready = asyncio.Event()
        self._is_closed = False
        # When the next frame is due, on the loop's clock.
        self._next_at = 0.0

    def submit(self, submission: scheduler_pb2.Submission) -> None:
        """Add a submission that `check_size` has passed."""
        self._frame_for(submission).submissions.append(submission)

    def attach(self, attachment: scheduler_pb2.Attachment) -> None:
        self._frame_for(attachment).attachments.append(attachment)

    def finish(self, finish: scheduler_pb2.Finish) -> None:
        self._frame_for(finish).finishes.append(finish)

    def detach(self, detachment: scheduler_pb2.Detachment) -> None:
        self._frame_for(detachment).detachments.append(detachment)

    def cancel(self, cancellation: scheduler_pb2.Cancellation) -> None:
        self._frame_for(cancellation).cancellations.append(cancellation)

    def look_up(self, lookup: scheduler_pb2.Lookup) -> None:
        self._frame_for(lookup).lookups.append(lookup)

    def close(self) -> None:
        """Close the queue; nothing may be added afterwards."""
        self._is_closed = True
        self._ready.set()

    async def get(self) -> scheduler_pb2.ConnectRequest | None:
        """Wait for the next frame to send. Returns None once the queue is closed and empty."""
        await self._ready.wait()
        if not self._full_frames:
            await self._wait_until_due()
        if self._full_frames:
            return self._full_frames.popleft()
        if self._is_closed and not self._num_bytes:
            return None
        if not self._is_closed:
            self._ready.clear()
        self._next_at = asyncio.get_running_loop().time() + FRAME_INTERVAL_S
        return self._start_frame()

    async def _wait_until_due(self) -> None:
        remaining_s = self._next_at - asyncio.get_running_loop().time()
        if remaining_s > 0 and not self._is_closed:
            await asyncio.sleep(remaining_s)

    def _frame_for(self, part: _Part) -> scheduler_pb2.ConnectRequest:
        num_bytes = part.ByteSize()
        if self._num_bytes + num_bytes > FRAME_BYTES:
            self._full_frames.append(self._start_frame())
        self._num_bytes += num_bytes
        self._ready.set()
        return self._frame

    def _start_frame(self) -> scheduler_pb2.ConnectRequest:
        """Start a new frame and return the previous one."""
        frame, self._frame = self._frame, scheduler_pb2.ConnectRequest()
        self._num_bytes = 0
        return frame


def check_size(submission: scheduler_pb2.Submission) -> None:
    """RequestError if the submission exceeds the size of a frame."""
    num_bytes = submission.ByteSize()
    if num_bytes > FRAME_BYTES:
        raise invalid(
            "prompt",
            "PROMPT_TOO_LONG",
            f"makes a message of {num_bytes} bytes; at most {FRAME_BYTES} are allowed",
        )
