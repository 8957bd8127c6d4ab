"""Clients that send more than they should, and what it costs the others."""

import asyncio
import gc
import zlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from http2_peer import Peer, data

from quire.service.http2 import frames
from quire.service.http2.frames import Frame, FrameReader
from quire.service.http2.headers import HeaderBlocks
from quire.service.http2.incomplete import Incomplete
from quire.service.http2.messages import PREFIX, pack_message
from quire.service.http2.output import OutputStream
from quire.service.http2.server_call import INITIAL_WINDOW

_CONNECTION = "quire.service.http2.server_connection"
_EMPTY_FRAMES = "quire.service.http2.empty_frames"
pytestmark = pytest.mark.usefixtures("long_slices")
_PING = frames.pack_frame(frames.PING, 0, 0, bytes(8))


async def test_others_are_served_between_frames(peer: Peer, monkeypatch) -> None:
    monkeypatch.setattr(f"{_CONNECTION}._MAX_SLICE_S", 0.0)
    peer.send(*[_PING] * 3)
    seen = []
    while not peer.transport.is_read:
        # What was written in the last iteration of the loop is sent in this one.
        seen.append(len(peer.transport.written))
        # Nothing is lost that arrives nevertheless.
        if len(seen) == 2:
            peer.send(_PING)
        await asyncio.sleep(0)
    assert seen == [len(_PING) * number for number in (0, 1, 2, 3)]
    assert len(await peer.received()) == 4


async def test_frames_in_wait_are_dropped_with_their_connection(peer: Peer, monkeypatch) -> None:
    monkeypatch.setattr(f"{_CONNECTION}._MAX_SLICE_S", 0.0)
    peer.send(*[_PING] * 3)
    peer.connection.connection_lost(None)
    assert len(await peer.received()) == 1


async def test_others_are_served_while_the_calls_of_a_lost_connection_end(
    peer: Peer, monkeypatch
) -> None:
    """A client may have thousands."""
    monkeypatch.setattr("quire.service.http2.ended_connections._MAX_SLICE_S", 0.0)
    num_held, num_steps = 0, 0

    async def hold(requests: AsyncIterator[bytes], context: Any) -> None:
        nonlocal num_held
        num_held += 1
        try:
            await asyncio.Event().wait()
        finally:
            num_held -= 1

    peer.handlers["/a.B/Hold"] = grpc.stream_stream_rpc_method_handler(hold, bytes, bytes)
    peer.send(*(peer.headers(1 + 2 * number, path="/a.B/Hold") for number in range(10)))
    await peer.received()
    assert num_held == 10
    peer.connection.connection_lost(None)
    while not peer.is_gone.is_set():
        num_before = num_held
        await asyncio.sleep(0)
        assert num_before - num_held <= 1
        num_steps += 1
    assert (num_held, num_steps > 10) == (0, True)


def _resets(peer: Peer, number: int) -> bytes:
    """A call that is cancelled at once."""
    return peer.headers(1 + 2 * number) + frames.pack_reset(1 + 2 * number, frames.CANCEL)


def _continued(peer: Peer, number: int) -> bytes:
    if number:
        return frames.pack_frame(frames.CONTINUATION, 0, 1)
    return frames.pack_frame(frames.HEADERS, 0, 1)


def _empty_data(peer: Peer, number: int) -> bytes:
    return (b"" if number else peer.headers(1)) + frames.pack_frame(frames.DATA, 0, 1)


@pytest.mark.parametrize(
    "flood",
    [
        lambda peer, number: _PING,
        lambda peer, number: frames.pack_frame(frames.PING, frames.ACK, 0, bytes(8)),
        lambda peer, number: frames.pack_settings({frames.INITIAL_WINDOW_SIZE: number}),
        lambda peer, number: frames.pack_frame(frames.SETTINGS, frames.ACK, 0),
        lambda peer, number: frames.pack_frame(2, 0, 1, bytes(5)),
        lambda peer, number: frames.pack_frame(200, 0, 0, b"unknown"),
        _resets,
        _continued,
        _empty_data,
    ],
)
async def test_too_many_frames_that_carry_nothing(peer: Peer, flood, monkeypatch, capsys) -> None:
    monkeypatch.setattr(f"{_EMPTY_FRAMES}._MAX_AT_ONCE", 100)
    for number in range(95):
        peer.send(flood(peer, number))
    assert not peer.transport.is_closed
    # Time passes meanwhile, and more are permitted then.
    number = 95
    while not peer.transport.is_closed:
        peer.send(flood(peer, number))
        number += 1
    assert "too many" in capsys.readouterr().out
    *_, last = await peer.received()
    assert (last.kind, last.payload[4:]) == (frames.GOAWAY, b"\0\0\0\x0b")


async def test_settings_count_by_the_windows_that_they_may_change(
    peer: Peer, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(f"{_EMPTY_FRAMES}._MAX_AT_ONCE", 100)
    monkeypatch.setattr(f"{_EMPTY_FRAMES}._CALLS_PER_FRAME", 0.01)
    # Nothing is forgotten meanwhile.
    monkeypatch.setattr(f"{_EMPTY_FRAMES}._MAX_PER_S", 0)
    peer.send(*(peer.headers(1 + 2 * number, "/a.B/Hold") for number in range(4)))
    peer.send(frames.pack_settings({frames.INITIAL_WINDOW_SIZE: 1}))
    peer.send(frames.pack_settings({frames.INITIAL_WINDOW_SIZE: 2}))
    assert not peer.transport.is_closed
    peer.send(frames.pack_settings({frames.INITIAL_WINDOW_SIZE: 3}))
    assert "too many" in capsys.readouterr().out


async def test_settings_that_change_no_window_touch_no_stream(peer: Peer, monkeypatch) -> None:
    peer.send(peer.headers(1, "/a.B/Hold"))
    raised: list[int] = []
    monkeypatch.setattr(OutputStream, "raise_window", lambda stream, by: raised.append(by))
    for size in (70_000, 70_000, 60_000):
        peer.send(frames.pack_settings({frames.INITIAL_WINDOW_SIZE: size}))
    assert raised == [70_000 - frames.DEFAULT_WINDOW, -10_000]


async def test_pings_at_the_permitted_rate(peer: Peer, monkeypatch) -> None:
    monkeypatch.setattr(f"{_EMPTY_FRAMES}._MAX_AT_ONCE", 2)
    monkeypatch.setattr(f"{_EMPTY_FRAMES}._MAX_PER_S", 10**9)
    for _ in range(10):
        peer.send(_PING)
        await asyncio.sleep(0.001)
    assert not peer.transport.is_closed


async def test_calls_of_a_client_that_reads_nothing(peer: Peer) -> None:
    """Statuses wait for no window, so that they would need more and more memory."""
    peer.send(peer.headers(1, "/a.B/Unknown", frames.END_STREAM))
    peer.transport.num_unread = 2**22
    peer.send(peer.headers(3, "/a.B/Unknown", frames.END_STREAM))
    assert peer.transport.is_closed


async def test_a_refusal_repeats_little_of_a_long_path(peer: Peer) -> None:
    peer.send(peer.headers(1, "/" + 10_000 * "é", frames.END_STREAM))
    [status] = await peer.received()
    assert len(status.payload) < 2000
    assert peer.fields(status)["grpc-status"] == "12"


async def test_a_malformed_block_of_headers_is_not_logged(peer: Peer, capsys) -> None:
    """It may have an API key."""
    block = b"\xff" * 10 + b"Bearer secret" * 1000
    peer.send(frames.pack_frame(frames.HEADERS, frames.END_HEADERS, 1, block))
    assert peer.transport.is_closed
    line = capsys.readouterr().out
    assert "HPACKDecodingError" in line
    assert "secret" not in line
    assert len(line) < 300


async def test_too_much_metadata_ends_its_call_alone(peer: Peer) -> None:
    peer.send(peer.headers(1), data(b"x"))
    peer.fields((await peer.received())[0])
    peer.send(peer.headers(3, **{f"key-{number}": "v" * 3000 for number in range(23)}))
    status, reset = await peer.received()
    assert peer.fields(status)["grpc-status"] == "8"
    assert "65536" in peer.fields(status)["grpc-message"]
    assert reset.kind == frames.RST_STREAM
    peer.send(data(b"y"))
    assert [one.kind for one in await peer.received()] == [frames.DATA]


async def test_too_many_fields_end_their_call_alone(peer: Peer) -> None:
    """An indexed field takes a byte to send, and a hundred as long as the call."""
    block = peer.headers(1, "/a.B/Hold")[frames.HEADER.size :]
    for stream, num_fields in ((1, 256 - 5), (3, 256 - 4)):
        fields = block + b"\x95" * num_fields
        peer.send(frames.pack_frame(frames.HEADERS, frames.END_HEADERS, stream, fields))
    status, reset = await peer.received()
    assert (status.stream, peer.fields(status)["grpc-status"]) == (3, "8")
    assert peer.fields(status)["grpc-message"] == "the metadata has 257 fields, more than 256"
    assert reset.kind == frames.RST_STREAM


@pytest.mark.parametrize("message", [b"", b"x"])
async def test_small_messages_fill_the_window(peer: Peer, message: bytes) -> None:
    peer.send(peer.headers(path="/a.B/Hold"))
    part = frames.pack_frame(frames.DATA, 0, 1, pack_message(message) * 10_000)
    for _ in range(INITIAL_WINDOW // (10_000 * (PREFIX.size + len(message)))):
        peer.send(part)
    assert not await peer.received()
    assert not peer.transport.is_closed
    peer.send(part)
    assert peer.transport.is_closed


async def test_others_run_while_small_messages_are_read(peer: Peer) -> None:
    num_read = 0

    async def count(requests: AsyncIterator[bytes], context: Any) -> bytes:
        nonlocal num_read
        async for _ in requests:
            num_read += 1
        return b""

    peer.handlers["/a.B/Count"] = grpc.stream_unary_rpc_method_handler(count, bytes, bytes)
    part = frames.pack_frame(frames.DATA, frames.END_STREAM, 1, pack_message(b"") * 1000)
    peer.send(peer.headers(path="/a.B/Count"), part)
    seen = set()
    while num_read < 1000:
        seen.add(num_read)
        await asyncio.sleep(0)
    assert len(seen) > 10


async def test_streams_alternate_when_little_may_be_sent(peer: Peer) -> None:
    peer.send(frames.pack_settings({frames.INITIAL_WINDOW_SIZE: 2**20}))
    peer.send(peer.headers(1), peer.headers(3), peer.headers(5))
    peer.send(*(data(bytes(995), 1) for _ in range(65)), data(bytes(530), 1))
    await peer.received()
    peer.send(*(data(bytes(95), number) for number in (1, 3, 5)))
    assert not [one for one in await peer.received() if one.kind == frames.DATA]
    peer.send(*[frames.pack_window_update(0, 10)] * 6)
    sent = await peer.received()
    assert {len(one.payload) for one in sent} == {10}
    assert [one.stream for one in sent] == [1, 3, 5, 1, 3, 5]


def _num_streams() -> int:
    gc.collect()
    return sum(isinstance(one, OutputStream) for one in gc.get_objects())


async def test_calls_that_end_without_having_sent_are_forgotten(peer: Peer) -> None:
    """A client whose connection's window is used up may begin any number of them."""
    num_before = _num_streams()
    peer.send(frames.pack_settings({frames.INITIAL_WINDOW_SIZE: 2**20}))
    peer.send(peer.headers(1), *(data(bytes(995), 1) for _ in range(66)))
    for stream in range(3, 23, 2):
        peer.send(peer.headers(stream), data(bytes(10), stream))
        await peer.received()
        peer.send(frames.pack_reset(stream, frames.CANCEL))
    await peer.received()
    assert _num_streams() == num_before + 1


async def test_what_is_no_call_is_refused(peer: Peer) -> None:
    peer.send(peer.headers(1, method="GET", flags=frames.END_STREAM))
    [refusal] = await peer.received()
    assert peer.fields(refusal) == {":status": "405", "allow": "POST"}
    peer.send(peer.headers(3, method="PUT"))
    peer.send(data(b"x", 3, frames.END_STREAM))
    [refusal] = await peer.received()
    assert peer.fields(refusal)[":status"] == "405"
    assert not peer.transport.is_closed


@pytest.mark.parametrize(
    ("encoding", "message", "status"),
    [
        ({}, b"x", "13"),
        ({"grpc-encoding": "br"}, b"x", "12"),
        ({"grpc-encoding": "gzip"}, b"x", "13"),
        ({"grpc-encoding": "deflate"}, zlib.compress(b"x")[:-1], "13"),
        ({"grpc-encoding": "deflate"}, zlib.compress(b"x") + b"y", "13"),
        ({"grpc-encoding": "deflate"}, zlib.compress(bytes(1001)), "8"),
    ],
)
async def test_a_compressed_message_that_is_not_read(
    peer: Peer, encoding: dict[str, str], message: bytes, status: str
) -> None:
    prefix = b"\1" + len(message).to_bytes(4, "big")
    peer.send(peer.headers(**encoding), frames.pack_frame(frames.DATA, 0, 1, prefix + message))
    refusal, reset = await peer.received()
    fields = peer.fields(refusal)
    assert fields["grpc-status"] == status
    assert fields["grpc-accept-encoding"] == "identity,gzip,deflate"
    if encoding.get("grpc-encoding", "br") == "br":
        name = encoding.get("grpc-encoding", "identity")
        assert fields["grpc-message"].endswith(
            f"grpc-encoding is {name}, accepted: identity,gzip,deflate"
        )
    assert reset.kind == frames.RST_STREAM
    assert not peer.transport.is_closed


async def test_the_largest_message_that_may_be_decompressed(peer: Peer) -> None:
    message = zlib.compress(bytes(1000))
    prefix = b"\1" + len(message).to_bytes(4, "big")
    peer.send(
        peer.headers(**{"grpc-encoding": "deflate"}),
        frames.pack_frame(frames.DATA, frames.END_STREAM, 1, prefix + message),
    )
    _, response, _ = await peer.received()
    assert response.payload == pack_message(bytes(1000))


async def test_a_request_that_cannot_be_parsed(peer: Peer, capsys) -> None:
    def parse(request: bytes) -> bytes:
        raise ValueError("no message")

    async def handle(request: bytes, context: Any) -> bytes:
        return request

    peer.handlers["/a.B/Parse"] = grpc.unary_unary_rpc_method_handler(handle, parse, bytes)
    peer.send(peer.headers(path="/a.B/Parse"), data(b"x", flags=frames.END_STREAM))
    [refusal] = await peer.received()
    assert peer.fields(refusal)["grpc-status"] == "13"
    assert "no message" in peer.fields(refusal)["grpc-message"]
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("begun", "more"),
    [
        (frames.HEADER.pack(2**16 << 8 | frames.DATA, 0, 1), b"\0"),
        # Each frame is complete, but not the block.
        (
            frames.pack_frame(frames.HEADERS, 0, 3),
            frames.pack_frame(frames.CONTINUATION, 0, 3, b"\x86"),
        ),
    ],
)
async def test_a_frame_or_a_block_of_headers_that_does_not_end(
    begun: bytes, more: bytes, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(f"{_CONNECTION}.KEEPALIVE_S", 0.02)
    monkeypatch.setattr("quire.service.http2.incomplete._MAX_S", 0.05)
    peer = Peer()
    peer.send(frames.PREFACE, peer.headers(1, "/a.B/Hold"), begun)
    while not peer.transport.is_closed:
        peer.send(more)
        await asyncio.sleep(0.001)
    assert "takes too long" in capsys.readouterr().out
    await peer.close()


def test_each_frame_and_each_block_has_a_time_of_its_own() -> None:
    reader, blocks = FrameReader(100), HeaderBlocks()
    incomplete = Incomplete(reader, blocks)
    frame = frames.pack_frame(frames.DATA, 0, 1, b"message")
    # Within the header of a frame, and behind it.
    for now_s, received in enumerate((frame[:5], frame[5:] + frame[:5], frame[5:] + frame[:12])):
        reader.feed(received)
        assert not incomplete.is_overdue(100 * now_s)
        assert not incomplete.is_overdue(100 * now_s + 20)
        assert incomplete.is_overdue(100 * now_s + 30)
    reader.feed(frame[12:])
    assert not incomplete.is_overdue(300)
    for now_s in (400, 500):
        blocks.feed(Frame(frames.HEADERS, 0, 1, b""))
        assert not incomplete.is_overdue(now_s)
        assert incomplete.is_overdue(now_s + 30)
        blocks.feed(Frame(frames.CONTINUATION, frames.END_HEADERS, 1, b""))
    assert not incomplete.is_overdue(600)


async def test_a_preface_that_does_not_end(monkeypatch) -> None:
    monkeypatch.setattr(f"{_CONNECTION}.KEEPALIVE_S", 0.02)
    peer = Peer()
    while not peer.transport.is_closed:
        peer.send(b"")
        await asyncio.sleep(0.001)
    await peer.close()
