"""How a standby notices the end of the leader's process, over real connections."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import structlog
from certificates import make_certificates
from waiting import until

from quire.internal.v1 import leadership_pb2_grpc
from quire.service.tls import TLS
from scheduler_svc.leadership import leader_watch
from scheduler_svc.leadership.leader_watch import LeaderWatch
from scheduler_svc.leadership.servicer import LeadershipServicer
from scheduler_svc.store.leadership import LeaseStore, StoredLeader
from scheduler_svc.store.store import Store


class Watched:
    """A scheduler's process, as far as its peers can see: it may end and start at its address."""

    def __init__(self, address: str, store: Store) -> None:
        self.address = address
        self.store = store
        self.num_calls = 0
        self._server: grpc.aio.Server | None = None

    @property
    def leader(self) -> StoredLeader:
        leadership = self.store.leadership
        return StoredLeader(leadership.epoch, leadership.holder, self.address)

    async def start(self, lease: LeaseStore | None) -> None:
        self._server = grpc.aio.server()
        servicer = LeadershipServicer(lambda: [] if lease is None else [lease])
        watch = servicer.Watch

        async def counted(*args):
            self.num_calls += 1
            async for response in watch(*args):
                yield response

        servicer.Watch = counted
        leadership_pb2_grpc.add_LeadershipServiceServicer_to_server(servicer, self._server)
        self._server.add_insecure_port(self.address)
        await self._server.start()

    async def end(self) -> None:
        if self._server is not None:
            await self._server.stop(grace=None)
            self._server = None


@asynccontextmanager
async def breakable(target: str, path: Path) -> AsyncIterator[Callable[[str], None]]:
    """Pass connections to a unix socket on to another one; the function breaks all of them, and
    has later ones passed on to its argument."""
    writers: list[asyncio.StreamWriter] = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(2**16):
                writer.write(data)
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_unix_connection(target.removeprefix("unix:"))
        except OSError:
            writer.close()
            return
        writers.extend((writer, back))
        await asyncio.gather(pump(reader, back), pump(there, writer))

    def break_connections(next_target: str) -> None:
        nonlocal target
        target = next_target
        for writer in writers:
            writer.transport.abort()

    async with await asyncio.start_unix_server(connected, path):
        yield break_connections
        break_connections(target)


@asynccontextmanager
async def serving(store: Store, path: Path, lease: LeaseStore | None) -> AsyncIterator[Watched]:
    watched = Watched(f"unix:{path}", store)
    await watched.start(lease)
    yield watched
    await watched.end()


@pytest.fixture
async def watched(redis_url: str, sockets: Path) -> AsyncIterator[Watched]:
    store = Store.at(redis_url)
    # A loss is noticed long before its end.
    await store.lease.acquire(f"unix:{sockets}/s.sock", lease_ms=60_000)
    async with serving(store, sockets / "s.sock", store.lease) as watched:
        yield watched
    await store.lease.release()
    await store.close()


@asynccontextmanager
async def watching(leader: StoredLeader) -> AsyncIterator[list[tuple[StoredLeader, bool]]]:
    """What a watch of the leader has reported: leaders, and whether they have ended."""
    lost: list[tuple[StoredLeader, bool]] = []
    watch = LeaderWatch(None, lambda leader, has_ended: lost.append((leader, has_ended)))
    watch.watch(leader)
    await until(lambda: watch.is_watching, "a watched leader")
    yield lost
    watch.stop()


async def test_an_ended_process_is_lost_without_waiting(watched: Watched) -> None:
    async with watching(watched.leader) as lost:
        await watched.end()
        await until(lambda: lost, "the loss")
    assert lost == [(watched.leader, True)]


async def test_another_process_at_its_address_does_not_hide_the_loss(
    watched: Watched, sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A busy machine may take longer.
    monkeypatch.setattr(leader_watch, "RECONNECT_WITHIN_S", 30)
    path = sockets / "breakable.sock"
    leader = replace(watched.leader, address=f"unix:{path}")
    async with (
        serving(watched.store, sockets / "other.sock", None) as other,
        breakable(watched.address, path) as break_connections,
        watching(leader) as lost,
    ):
        break_connections(other.address)
        await until(lambda: lost, "the loss")
    # That one has not ended: it may be the leader by now, whose end this is not.
    assert lost == [(leader, False)]


async def test_the_files_of_tls_are_read_at_each_attempt(
    watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader_watch, "RETRY_INTERVAL_S", 0.01)
    folder = make_certificates(tmp_path)
    ca = folder / "ca.pem"
    tls, trusted = TLS(ca), ca.read_bytes()
    ca.unlink()
    server = grpc.aio.server()
    leadership_pb2_grpc.add_LeadershipServiceServicer_to_server(
        LeadershipServicer(lambda: [watched.store.lease]), server
    )
    pair = [(folder / f"scheduler{end}.pem").read_bytes() for end in ("-key", "")]
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([tuple(pair)]))
    await server.start()
    lost: list[StoredLeader] = []
    watch = LeaderWatch(tls, lambda leader, _: lost.append(leader))
    monkeypatch.setattr(leader_watch, "UNREACHED_S", 0.0)
    with structlog.testing.capture_logs() as logged:
        watch.watch(replace(watched.leader, address=f"127.0.0.1:{port}"))
        await until(lambda: logged, "a warning")
    assert f"{ca} cannot be read" in logged[0]["reason"]
    # Another authority's, and the right one at last.
    ca.write_bytes((make_certificates(tmp_path / "stranger") / "ca.pem").read_bytes())
    await asyncio.sleep(0)
    ca.write_bytes(trusted)
    await until(lambda: watch.is_watching, "a watched leader")
    await server.stop(None)
    await until(lambda: lost, "the loss")
    watch.stop()


async def test_a_released_lease_is_reported_at_once(watched: Watched) -> None:
    async with watching(watched.leader) as lost:
        leader = watched.leader
        await watched.store.lease.release()
        await until(lambda: lost, "the release")
    assert lost == [(leader, False)]


async def test_a_broken_connection_alone_is_no_loss(
    watched: Watched, sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A busy machine may take longer.
    monkeypatch.setattr(leader_watch, "RECONNECT_WITHIN_S", 30)
    lost: list[tuple[StoredLeader, bool]] = []
    watch = LeaderWatch(None, lambda leader, has_ended: lost.append((leader, has_ended)))
    async with breakable(watched.address, sockets / "breakable.sock") as break_connections:
        leader = replace(watched.leader, address=f"unix:{sockets}/breakable.sock")
        watch.watch(leader)
        await until(lambda: watch.is_watching, "a watched leader")
        # Its address is never without a server: that would be a process that has ended.
        break_connections(watched.address)
        await until(lambda: watched.num_calls == 2 and watch.is_watching, "the leader again")
        assert lost == []
        await watched.end()
        await until(lambda: lost == [(leader, True)], "the loss")
    watch.stop()


async def test_who_was_never_seen_to_lead_is_not_lost(watched: Watched, monkeypatch) -> None:
    monkeypatch.setattr(leader_watch, "RETRY_INTERVAL_S", 0.01)
    lost: list[tuple[StoredLeader, bool]] = []
    watch = LeaderWatch(None, lambda leader, has_ended: lost.append((leader, has_ended)))
    # Its address leads to another scheduler, as 0.0.0.0 does.
    other = StoredLeader(watched.leader.epoch, b"another holder..", watched.address)
    watch.watch(other)
    await until(lambda: watched.num_calls >= 3, "several attempts")
    await watched.end()
    await asyncio.sleep(0.1)
    assert lost == []
    watch.watch(StoredLeader(1, b"", f"{watched.address}-absent"))
    await asyncio.sleep(0.1)
    assert lost == []
    watch.stop()


@pytest.mark.parametrize("is_reached", [False, True])
@pytest.mark.slow
async def test_a_leader_that_cannot_be_reached_is_logged(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, is_reached: bool
) -> None:
    monkeypatch.setattr(leader_watch, "UNREACHED_S", 2.0 if is_reached else 0.1)
    leader = replace(watched.leader, address=watched.address if is_reached else "unix:/no/such")
    watch = LeaderWatch(None, lambda leader, has_ended: None)
    with structlog.testing.capture_logs() as logged:
        watch.watch(leader)
        await asyncio.sleep(leader_watch.UNREACHED_S + 0.2)
        watch.stop()
    addresses = [entry["address"] for entry in logged if entry["log_level"] == "warning"]
    assert addresses == ([] if is_reached else ["unix:/no/such"])
