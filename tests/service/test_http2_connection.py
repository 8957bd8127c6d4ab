"""The server's end of a connection, frame by frame."""

import pytest
from hpack import Encoder
from http2_peer import Peer, data
from hypothesis import given
from hypothesis import strategies as st
from waiting import until

from quire.service.http2 import frames
from quire.service.http2.frames import Frame
from quire.service.http2.limits import Limits
from quire.service.http2.messages import pack_message
from quire.service.http2.server_call import INITIAL_WINDOW

pytestmark = pytest.mark.usefixtures("long_slices")


async def test_a_call_has_headers_messages_and_a_status(peer: Peer) -> None:
    peer.send(peer.headers(), data(b"x"), data(b"y", flags=frames.END_STREAM))
    first, x, y, last = await peer.received()
    assert peer.fields(first)[":status"] == "200"
    assert (x.payload, y.payload) == (pack_message(b"x"), pack_message(b"y"))
    assert last.flags == frames.END_HEADERS | frames.END_STREAM
    assert peer.fields(last) == {"grpc-status": "0"}


@given(size=st.integers(1, 60))
async def test_bytes_arrive_in_pieces_of_any_size(size: int) -> None:
    peer = Peer()
    sent = b"".join(
        [frames.PREFACE, frames.pack_settings({}), peer.headers(), data(b"abc"), data(b"d")]
    )
    for start in range(0, len(sent), size):
        peer.send(sent[start : start + size])
    payloads = [one.payload for one in await peer.received() if one.kind == frames.DATA]
    assert payloads == [pack_message(b"abc"), pack_message(b"d")]
    await peer.close()


async def test_header_blocks_continue_in_other_frames(peer: Peer) -> None:
    whole = peer.headers()[frames.HEADER.size :]
    peer.send(
        frames.pack_frame(frames.HEADERS, 0, 1, whole[:3]),
        frames.pack_frame(frames.CONTINUATION, 0, 1),
        frames.pack_frame(frames.CONTINUATION, frames.END_HEADERS, 1, whole[3:]),
        data(b"x"),
    )
    assert [one.kind for one in await peer.received()] == [frames.HEADERS, frames.DATA]


_OPEN = frames.PREFACE + frames.pack_settings({})


@pytest.mark.parametrize(
    ("received", "reason"),
    [
        (frames.pack_frame(frames.HEADERS, frames.END_HEADERS, 1, b"\xff"), "headers"),
        # Decoding a number of unlimited length would take quadratic time.
        (
            frames.pack_frame(
                frames.HEADERS, frames.END_HEADERS, 1, b"\x3f" + b"\x80" * 20 + b"\0"
            ),
            "headers",
        ),
        (
            frames.pack_frame(frames.HEADERS, 0, 1, bytes(2**16))
            + frames.pack_frame(frames.CONTINUATION, 0, 1, bytes(2**16))
            + frames.pack_frame(frames.CONTINUATION, 0, 1, b"x"),
            "too large",
        ),
        # An indexed field, which counts 35 bytes.
        (
            frames.pack_frame(frames.HEADERS, frames.END_HEADERS, 1, b"\x95" * (2**17 // 35 + 1)),
            "OversizedHeaderListError",
        ),
        (
            frames.pack_frame(frames.HEADERS, frames.END_HEADERS, 1, b"\x20\x3f\xe1\x1f" * 3),
            "too many changes",
        ),
        (frames.pack_frame(frames.HEADERS, 0, 1) + frames.pack_frame(6, 0, 0), "incomplete"),
        (
            frames.pack_frame(frames.HEADERS, 0, 1) + frames.pack_frame(9, 4, 3),
            "incomplete",
        ),
        (frames.pack_frame(frames.CONTINUATION, 0, 1), "no start"),
        (frames.pack_frame(frames.HEADERS, frames.END_HEADERS, 2), "even"),
        (frames.pack_frame(frames.HEADERS, frames.END_HEADERS, 0), "even"),
        (frames.pack_frame(frames.DATA, 0, 1), "not begun"),
        (frames.pack_frame(frames.DATA, 0, 0), "not begun"),
        (frames.pack_reset(1, 8), "not begun"),
        (frames.pack_window_update(1, 1), "not begun"),
        (frames.pack_window_update(0, 0), "nothing"),
        (frames.pack_window_update(0, 2**31 - 1), "too large"),
        (frames.pack_frame(frames.WINDOW_UPDATE, 0, 0, b"x"), "too short"),
        (frames.pack_frame(frames.SETTINGS, 0, 0, b"x"), "settings"),
        (frames.pack_settings({frames.INITIAL_WINDOW_SIZE: 2**31}), "out of range"),
        (frames.pack_settings({frames.MAX_FRAME_SIZE: 1}), "out of range"),
        (frames.pack_frame(frames.PING, 0, 0, b"x"), "ping"),
        (frames.pack_frame(frames.PUSH_PROMISE, 0, 1), "pushes"),
        (b"\xff\xff\xff\0\0\0\0\0\1", "bytes"),
    ],
)
async def test_what_breaks_the_protocol_closes_the_connection(
    peer: Peer, received: bytes, reason: str, capsys
) -> None:
    peer.send(received)
    assert peer.transport.is_closed
    assert reason in capsys.readouterr().out
    *_, last = await peer.received()
    assert (last.kind, last.payload) == (frames.GOAWAY, b"\0\0\0\0\0\0\0\1")
    # What follows is of no interest.
    peer.send(received)
    assert not await peer.received()


async def test_more_data_than_the_window_closes_the_connection(peer: Peer) -> None:
    peer.send(peer.headers(path="/a.B/Hold"))
    part = frames.pack_frame(frames.DATA, 0, 1, pack_message(bytes(1000)) * 60)
    for _ in range(INITIAL_WINDOW // len(part)):
        peer.send(part)
        assert not peer.transport.is_closed
    peer.send(part)
    assert peer.transport.is_closed


async def test_data_behind_the_end_closes_the_connection(peer: Peer) -> None:
    peer.send(peer.headers(path="/a.B/Hold", flags=frames.END_STREAM))
    assert not peer.transport.is_closed
    peer.send(data(b"x"))
    assert peer.transport.is_closed


async def test_an_incomplete_last_message_ends_its_call(peer: Peer) -> None:
    peer.send(peer.headers(), frames.pack_frame(frames.DATA, frames.END_STREAM, 1, b"\0\0\0\0\2x"))
    [status] = await peer.received()
    assert peer.fields(status)["grpc-status"] == "13"
    assert not peer.transport.is_closed


async def test_frames_of_ended_calls_are_ignored(peer: Peer) -> None:
    peer.send(peer.headers(), frames.pack_reset(1, frames.CANCEL))
    peer.send(
        data(b"x"),
        frames.pack_window_update(1, 5),
        frames.pack_reset(1, frames.CANCEL),
        frames.pack_frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, 1),
        frames.pack_frame(2, 0, 1, bytes(5)),
        frames.pack_frame(200, 0, 0, b"unknown"),
    )
    assert not await peer.received()
    assert not peer.transport.is_closed


async def test_frames_of_many_streams_are_sent_together(peer: Peer) -> None:
    streams = range(1, 21, 2)
    peer.send(*(peer.headers(stream) for stream in streams))
    await peer.received()
    before = peer.transport.num_writes
    peer.send(*(data(b"x", stream) for stream in streams))
    sent = [frame.stream for frame in await peer.received() if frame.kind == frames.DATA]
    assert sent == [*streams]
    assert peer.transport.num_writes == before + 1


async def test_what_was_written_is_sent_before_the_end(peer: Peer) -> None:
    peer.send(peer.headers(), data(b"x", flags=frames.END_STREAM))
    peer.connection.drain()
    sent = await peer.received()
    assert [frame.kind for frame in sent[-2:]] == [frames.DATA, frames.HEADERS]
    assert peer.transport.is_closed


@pytest.mark.parametrize("content_type", ["", "text/html", "application/grpc-web+proto"])
async def test_another_content_type_is_refused(peer: Peer, content_type: str) -> None:
    fields = [(":method", "POST"), (":path", "/a.B/Echo"), ("content-type", content_type)]
    block = Encoder().encode(fields)
    peer.send(frames.pack_frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, 1, block))
    [refusal] = await peer.received()
    assert peer.fields(refusal) == {":status": "415"}


async def test_pings_are_acknowledged(peer: Peer) -> None:
    peer.send(frames.pack_frame(frames.PING, 0, 0, b"12345678"))
    peer.send(frames.pack_frame(frames.PING, frames.ACK, 0, b"12345678"))
    assert await peer.received() == [Frame(frames.PING, frames.ACK, 0, b"12345678")]


async def test_a_client_that_reads_no_acknowledgements_is_disconnected(peer: Peer) -> None:
    peer.transport.num_unread = 2**22
    peer.send(frames.pack_frame(frames.PING, 0, 0, b"12345678"))
    assert peer.transport.is_closed


@pytest.mark.parametrize("peer", [Limits(1000, max_calls=2)], indirect=True)
async def test_calls_beyond_the_limit_are_refused(peer: Peer) -> None:
    peer.send(*(peer.headers(number, "/a.B/Hold") for number in (1, 3, 5)))
    assert await peer.received() == [
        Frame(frames.RST_STREAM, 0, 5, frames.U32.pack(frames.REFUSED_STREAM))
    ]
    # Those that were cancelled count until their handlers have ended.
    peer.send(frames.pack_reset(1, 8), peer.headers(7, "/a.B/Hold"))
    assert [one.kind for one in await peer.received()] == [frames.RST_STREAM]
    peer.send(peer.headers(9), data(b"x", 9))
    assert [one.kind for one in await peer.received()] == [frames.HEADERS, frames.DATA]


@pytest.mark.parametrize("peer", [Limits(1000, max_age_s=0.01)], indirect=True)
async def test_an_old_connection_is_closed_when_the_client_has_responded(peer: Peer) -> None:
    peer.send(peer.headers(1), data(b"x", 1))
    ending = frames.pack_goaway(frames.MAX_STREAM, frames.NO_ERROR)
    await until(lambda: ending in peer.transport.written, "the end of its age")
    *_, goaway, ping = await peer.received()
    assert (goaway.kind, ping.kind, ping.flags) == (frames.GOAWAY, frames.PING, 0)
    # A call that was on its way.
    peer.send(peer.headers(3), data(b"y", 3))
    assert [one.kind for one in await peer.received()] == [frames.HEADERS, frames.DATA]
    peer.send(frames.pack_frame(frames.PING, frames.ACK, 0, ping.payload))
    [goaway] = await peer.received()
    assert (goaway.kind, goaway.number) == (frames.GOAWAY, 3)
    # One that was not, and which the client sends again.
    peer.send(peer.headers(5))
    assert [one.kind for one in await peer.received()] == [frames.RST_STREAM]
    peer.send(data(b"", 1, frames.END_STREAM), data(b"z", 3))
    assert not peer.transport.is_closed
    peer.send(data(b"", 3, frames.END_STREAM))
    assert [one.stream for one in await peer.received()] == [1, 1, 3, 3, 3]
    assert peer.transport.is_closed


@pytest.mark.parametrize("peer", [Limits(1000, max_age_s=0.01)], indirect=True)
async def test_an_old_connection_of_a_client_that_does_not_respond(peer: Peer, monkeypatch) -> None:
    monkeypatch.setattr("quire.service.http2.server_connection.PING_TIMEOUT_S", 0.01)
    await until(lambda: peer.transport.is_closed, "the end")
    assert [one.kind for one in await peer.received()] == [
        frames.GOAWAY,
        frames.PING,
        frames.GOAWAY,
    ]


async def test_messages_wait_for_the_windows_and_are_sent_alternately(peer: Peer) -> None:
    peer.send(frames.pack_settings({frames.INITIAL_WINDOW_SIZE: 0}))
    peer.send(peer.headers(1), peer.headers(3), data(bytes(95), 1), data(bytes(95), 3))
    sent = await peer.received()
    assert not [one for one in sent if one.kind == frames.DATA]
    peer.send(frames.pack_window_update(3, 10))
    assert [(one.stream, len(one.payload)) for one in await peer.received()] == [(3, 10)]
    peer.send(frames.pack_settings({frames.INITIAL_WINDOW_SIZE: 50}))
    acknowledgement, *sent = await peer.received()
    assert acknowledgement == Frame(frames.SETTINGS, frames.ACK, 0, b"")
    assert [(one.stream, len(one.payload)) for one in sent] == [(1, 50), (3, 50)]
    peer.connection.pause_writing()
    peer.send(frames.pack_window_update(1, 1000), frames.pack_window_update(3, 1000))
    assert not await peer.received()
    peer.connection.resume_writing()
    assert [(one.stream, len(one.payload)) for one in await peer.received()] == [(1, 50), (3, 40)]


_RAISES = st.tuples(st.sampled_from([0, 1, 3, 5]), st.integers(1, 3000))
_INITIAL = st.tuples(st.just("initial"), st.integers(0, 5000))
_SOCKET = st.tuples(st.just("socket"), st.integers(0, 1))


@given(
    st.lists(st.integers(0, 1000), min_size=1, max_size=5),
    st.lists(_RAISES | _INITIAL | _SOCKET, max_size=20),
)
async def test_all_is_sent_in_order_however_windows_are_raised(
    sizes: list[int], changes: list[tuple[int | str, int]]
) -> None:
    peer = Peer()
    peer.send(frames.PREFACE, frames.pack_settings({frames.INITIAL_WINDOW_SIZE: 0}))
    expected = {}
    for stream in (1, 3, 5):
        messages = [bytes([stream]) * size for size in sizes]
        peer.send(peer.headers(stream), *(data(message, stream) for message in messages))
        peer.send(frames.pack_frame(frames.DATA, frames.END_STREAM, stream))
        expected[stream] = b"".join(map(pack_message, messages))
    await peer.received()
    sent = dict.fromkeys(expected, b"")
    final = [("socket", 1), ("initial", 2**20), (0, 2**20)]
    for where, amount in [*changes, *final]:
        if where == "initial":
            peer.send(frames.pack_settings({frames.INITIAL_WINDOW_SIZE: amount}))
        elif where == "socket":
            (peer.connection.resume_writing if amount else peer.connection.pause_writing)()
        else:
            peer.send(frames.pack_window_update(int(where), amount))
        for _ in sizes:
            for one in await peer.received():
                if one.kind == frames.DATA:
                    sent[one.stream] += one.payload
    assert sent == expected
    await peer.close()


async def test_the_window_of_the_connection_bounds_all_streams(peer: Peer) -> None:
    peer.send(*(peer.headers(1 + 2 * number) for number in range(80)))
    peer.send(*(data(bytes(995), 1 + 2 * number) for number in range(80)))
    sent = [one for one in await peer.received() if one.kind == frames.DATA]
    assert sum(len(one.payload) for one in sent) == frames.DEFAULT_WINDOW
    peer.send(frames.pack_window_update(0, 2**20))
    sent = [one for one in await peer.received() if one.kind == frames.DATA]
    assert sum(len(one.payload) for one in sent) == 80_000 - frames.DEFAULT_WINDOW


@pytest.mark.parametrize(
    ("sizes", "updates"),
    [([0, 0], b"\x20"), ([100, 0, 4096] * 30, b"\x20\x3f\xe1\x1f"), ([4096, 2**32 - 1], b"")],
)
async def test_headers_name_the_least_and_the_last_size_of_the_table(
    peer: Peer, sizes: list[int], updates: bytes
) -> None:
    """As their decoder needs it."""
    peer.send(*(frames.pack_settings({frames.HEADER_TABLE_SIZE: size}) for size in sizes))
    peer.send(peer.headers(), data(b"message"))
    [headers] = [one for one in await peer.received() if one.kind == frames.HEADERS]
    # The first field is one of the static table.
    assert headers.payload.startswith(updates + b"\x88")
    assert peer.fields(headers)[":status"] == "200"


async def test_a_client_may_change_the_size_of_its_table(peer: Peer) -> None:
    block = peer.headers()[frames.HEADER.size :]
    updates = b"\x20\x3f\xe1\x1f"
    peer.send(frames.pack_frame(frames.HEADERS, frames.END_HEADERS, 1, updates + block), data(b"x"))
    assert [one.kind for one in await peer.received()] == [frames.HEADERS, frames.DATA]


async def test_windows_are_raised_by_what_was_read(peer: Peer) -> None:
    part = frames.pack_frame(frames.DATA, 0, 1, pack_message(bytes(1000)) * 60)
    peer.send(
        peer.headers(), frames.pack_window_update(0, 2**30), frames.pack_window_update(1, 2**30)
    )
    raised = 0
    for _ in range(2 * INITIAL_WINDOW // len(part)):
        peer.send(part)
        raised += sum(
            one.number for one in await peer.received() if one.kind == frames.WINDOW_UPDATE
        )
    assert not peer.transport.is_closed
    assert raised > INITIAL_WINDOW // 2


async def test_a_drain_ends_with_the_last_call(peer: Peer) -> None:
    peer.send(peer.headers(), data(b"x"))
    await peer.received()
    peer.connection.drain()
    peer.send(peer.headers(3))
    goaway, refusal = await peer.received()
    assert (goaway.kind, goaway.payload) == (frames.GOAWAY, b"\0\0\0\1\0\0\0\0")
    assert (refusal.kind, refusal.stream) == (frames.RST_STREAM, 3)
    peer.send(data(b"y"))
    assert [one.kind for one in await peer.received()] == [frames.DATA]
    assert not peer.transport.is_closed
    peer.send(frames.pack_frame(frames.DATA, frames.END_STREAM, 1))
    assert [one.kind for one in await peer.received()] == [frames.HEADERS]
    assert peer.transport.is_closed


@given(st.binary(max_size=200), st.booleans())
async def test_no_bytes_raise_an_error(garbage: bytes, is_opened: bool) -> None:
    peer = Peer()
    if is_opened:
        peer.send(_OPEN, peer.headers())
    peer.send(garbage)
    await peer.received()
    await peer.close()
