"""What clients have sent and handlers have not read: all calls together have a limit."""

import asyncio
import base64
import threading

import pytest
from google.rpc import status_pb2
from http2_peer import LIMITS, Peer
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import until

from quire.service.errors import RequestError
from quire.service.http2 import frames
from quire.service.http2.frames import Frame
from quire.service.http2.limits import Limits
from quire.service.http2.messages import PREFIX, pack_message
from quire.service.http2.unread import UnreadMessages

_MOST = 100
# Takes one request.
_ONE = "/a.B/One"
limited = pytest.mark.parametrize(
    "peer", [Limits(LIMITS.max_message_bytes, max_unread_bytes=_MOST)], indirect=True
)
pytestmark = pytest.mark.usefixtures("long_slices")


def data(content: bytes, stream: int, flags: int = 0) -> bytes:
    return frames.pack_frame(frames.DATA, flags, stream, content)


def check_refusal(peer: Peer, frame: Frame, stream: int) -> None:
    fields = peer.fields(frame)
    assert (frame.stream, fields["grpc-status"]) == (stream, "8")
    packed = fields["grpc-status-details-bin"]
    details = base64.b64decode(packed + "=" * (-len(packed) % 4))
    assert b"TOO_MANY_REQUEST_BYTES" in details
    assert len(status_pb2.Status.FromString(details).details) == 2


async def statuses(peer: Peer) -> dict[int, str]:
    """The calls that have ended since the last call, by their streams."""
    headers = [frame for frame in await peer.received() if frame.kind == frames.HEADERS]
    # All are decoded, as the table of names is that of the connection.
    fields = {frame.stream: peer.fields(frame) for frame in headers}
    return {stream: one["grpc-status"] for stream, one in fields.items() if "grpc-status" in one}


@limited
async def test_the_call_that_holds_most_is_refused_and_the_others_go_on(peer: Peer) -> None:
    message = pack_message(bytes(60))
    peer.send(peer.headers(1), data(pack_message(bytes(90))[:70], 1))
    peer.send(peer.headers(3), data(message[:40], 3))
    refusal, _reset = await peer.received()
    check_refusal(peer, refusal, 1)
    # What was on its way is dropped.
    peer.send(data(bytes(25), 1, frames.END_STREAM))
    assert peer.unread.num_bytes == 40
    peer.send(data(message[40:], 3, frames.END_STREAM))
    _, response, _ = await peer.received()
    assert (response.stream, response.payload) == (3, message)
    assert peer.unread.num_bytes == 0


@limited
async def test_the_largest_call_may_be_the_one_that_sends(peer: Peer) -> None:
    peer.send(peer.headers(1), data(pack_message(bytes(90))[:30], 1))
    peer.send(peer.headers(3), data(pack_message(bytes(90))[:80], 3, frames.END_STREAM))
    refusal, *_ = await peer.received()
    check_refusal(peer, refusal, 3)
    assert peer.unread.num_bytes == 30


@limited
async def test_a_call_that_is_alone_may_send_its_messages(peer: Peer) -> None:
    message = pack_message(bytes(LIMITS.max_message_bytes))
    peer.send(peer.headers(1), data(message, 1, frames.END_STREAM))
    _, response, _ = await peer.received()
    assert response.payload == message


@limited
async def test_messages_that_no_handler_reads_count(peer: Peer) -> None:
    peer.send(peer.headers(1, "/a.B/Hold"), data(pack_message(bytes(80)), 1))
    await peer.received()
    assert peer.unread.num_bytes == 85
    peer.send(peer.headers(3), data(pack_message(bytes(20))[:20], 3))
    refusal, *_ = await peer.received()
    check_refusal(peer, refusal, 1)
    peer.send(frames.pack_reset(3, frames.CANCEL))
    assert peer.unread.num_bytes == 0


@limited
async def test_a_lost_connection_holds_nothing(peer: Peer) -> None:
    peer.send(peer.headers(1), data(pack_message(bytes(80))[:70], 1))
    peer.connection.connection_lost(None)
    assert peer.unread.num_bytes == 0


@limited
async def test_messages_are_decompressed_two_at_a_time_and_count_meanwhile(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each may be a thousand times as large as what was sent."""
    num_begun, go_on = 0, threading.Semaphore(0)

    def decompress(message: bytes, name: str, max_bytes: int) -> bytes:
        nonlocal num_begun
        num_begun += 1
        go_on.acquire()
        return message

    monkeypatch.setattr("quire.service.http2.compression._SMALL_BYTES", 0)
    monkeypatch.setattr("quire.service.http2.compression._decompress", decompress)
    message = PREFIX.pack(True, 20) + bytes(20)
    for stream in (1, 3, 5, 7):
        peer.send(peer.headers(stream, _ONE, **{"grpc-encoding": "gzip"}))
        peer.send(data(message, stream, frames.END_STREAM))
    await until(lambda: num_begun == 2, "threads")
    assert await statuses(peer) == {}
    assert peer.unread.num_bytes == 80
    # The thread of a call that was cancelled is not free yet.
    peer.send(frames.pack_reset(1, frames.CANCEL))
    assert await statuses(peer) == {}
    assert (num_begun, peer.unread.num_bytes) == (2, 60)
    go_on.release()
    await until(lambda: num_begun == 3, "a free thread")
    peer.send(peer.headers(9), data(pack_message(bytes(90))[:50], 9))
    assert await statuses(peer) == {9: "8"}
    for _ in range(3):
        go_on.release()
    ended: dict[int, str] = {}
    while len(ended) < 3:
        ended |= await statuses(peer)
    assert ended == {3: "0", 5: "0", 7: "0"}
    assert peer.unread.num_bytes == 0


@pytest.mark.parametrize(
    "peer", [Limits(LIMITS.max_message_bytes, max_waiting_calls=2)], indirect=True
)
async def test_of_too_many_calls_that_wait_the_oldest_is_refused(peer: Peer) -> None:
    message = pack_message(b"now")
    # Two that wait for a request, of which one has begun, and one that has its request at once.
    peer.send(peer.headers(1, _ONE), peer.headers(3, _ONE), data(message[:6], 3))
    peer.send(peer.headers(5, _ONE), data(message, 5, frames.END_STREAM))
    assert await statuses(peer) == {5: "0"}
    # Reflection waits for its client, too.
    peer.send(peer.headers(7))
    assert await statuses(peer) == {1: "8"}
    peer.send(data(message[6:], 3, frames.END_STREAM))
    assert await statuses(peer) == {3: "0"}
    peer.send(peer.headers(9, _ONE))
    assert await statuses(peer) == {}


async def test_a_call_that_sends_no_request_ends(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.service.http2.server_call.SILENCE_S", 0.05)
    peer.send(peer.headers(1, _ONE), peer.headers(3))
    await until(lambda: bool(peer.transport.written), "the end of a call")
    # Streams of requests may be silent.
    assert await statuses(peer) == {1: "4"}


async def test_a_request_may_arrive_slowly(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.service.http2.server_call.SILENCE_S", 0.05)
    peer.send(peer.headers(1, _ONE))
    for byte in pack_message(bytes(10)):
        await asyncio.sleep(0.01)
        peer.send(data(bytes([byte]), 1))
    peer.send(data(b"", 1, frames.END_STREAM))
    assert await statuses(peer) == {1: "0"}


async def test_a_call_whose_client_takes_no_response_ends(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.service.http2.server_call.TAKING_S", 0.05)
    peer.send(frames.pack_settings({frames.INITIAL_WINDOW_SIZE: 10}))
    peer.send(peer.headers(1), data(pack_message(bytes(50)), 1))
    await peer.received()
    await until(lambda: bool(peer.transport.written), "the end of a call")
    assert await statuses(peer) == {1: "8"}


async def test_a_response_may_be_taken_slowly(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.service.http2.server_call.TAKING_S", 0.05)
    peer.send(frames.pack_settings({frames.INITIAL_WINDOW_SIZE: 0}))
    peer.send(peer.headers(1), data(pack_message(bytes(5)), 1, frames.END_STREAM))
    for _ in range(PREFIX.size + 5):
        await asyncio.sleep(0.01)
        peer.send(frames.pack_window_update(1, 1))
    assert await statuses(peer) == {1: "0"}


class Call:
    """Holds bytes until it is refused."""

    def __init__(self, unread: UnreadMessages) -> None:
        self.num_bytes = 0
        self._unread = unread

    def hold(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._unread.set(self, num_bytes)

    def refuse(self, error: RequestError) -> None:
        self.hold(0)


@given(acts=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 150))))
@settings(deadline=None)
def test_more_than_the_limit_is_held_by_a_call_alone_at_most(acts: list[tuple[int, int]]) -> None:
    unread = UnreadMessages(_MOST)
    calls = [Call(unread) for _ in range(4)]
    for number, num_bytes in acts:
        before = [call.num_bytes for call in calls]
        calls[number].hold(num_bytes)
        after = [call.num_bytes for call in calls]
        assert unread.num_bytes == sum(after)
        assert unread.num_bytes <= _MOST or sum(map(bool, after)) == 1
        # Those that are left hold no more than those that were refused.
        wanted = [num_bytes if at == number else one for at, one in enumerate(before)]
        refused = [one for one, left in zip(wanted, after, strict=True) if one and not left]
        assert not refused or max(after) <= min(refused)


def test_without_a_limit_nothing_is_counted() -> None:
    unread = UnreadMessages(None)
    Call(unread).hold(10**9)
    assert unread.num_bytes == 0
