"""TLS of servers and channels, with certificates of the product's own script."""

import asyncio
import os
import resource
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from certificates import make_certificates
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from quire.service import tls
from quire.service.channels import PUBLIC_MESSAGE_BYTES
from quire.service.health import Health
from quire.service.http2 import frames
from quire.service.http2.connect import find_obstacle
from quire.service.http2.limits import Limits
from quire.service.http2.server import Server
from quire.service.lifecycle import start_server
from quire.service.metrics.server import export_expiry
from quire.service.tls import TLS, ServerCertificates, ServerTLS, TLSError, open_aio_channel

SERVICE = "example.v1.ExampleService"


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    return make_certificates(tmp_path / "certificates")


def identity(directory: Path, name: str, client_ca: Path | None = None) -> ServerTLS:
    return ServerTLS(directory / f"{name}.pem", directory / f"{name}-key.pem", client_ca)


@asynccontextmanager
async def serving(tls: ServerTLS, health_listen: str | None = None) -> AsyncIterator[str]:
    server = Server(Limits(PUBLIC_MESSAGE_BYTES))
    health = Health((), (SERVICE,))
    yield await start_server(
        server,
        "127.0.0.1:0",
        (SERVICE,),
        health,
        certificates=ServerCertificates(tls, "h2"),
        health_listen=health_listen,
    )
    await server.stop(None)
    await health.close()


async def is_served(address: str, tls: TLS | None, host: str | None = None) -> bool:
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with open_aio_channel(address, options, tls, host) as channel:
        call = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), timeout=10
        )
        code = await call.code()
    assert code in (grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE)
    return code is grpc.StatusCode.OK


async def test_a_client_verifies_the_server(
    certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = make_certificates(tmp_path / "stranger")
    async with serving(identity(certificates, "gateway")) as address:
        assert await is_served(address, TLS(certificates / "ca.pem"))
        assert await is_served(address, TLS(certificates / "ca.pem"), "gateway-2")
        assert await is_served(address, TLS(certificates / "ca.pem", server_name="gateway"), "x")
        assert not await is_served(address, TLS(certificates / "ca.pem"), "scheduler")
        assert not await is_served(address, TLS(stranger / "ca.pem"))
        assert not await is_served(address, TLS())
        assert not await is_served(address, None)
        # The system's authorities are not trusted beside those of a file.
        monkeypatch.setenv("SSL_CERT_FILE", str(certificates / "ca.pem"))
        assert not await find_obstacle(address, TLS(), "gateway")
        assert "verify failed" in await find_obstacle(address, TLS(stranger / "ca.pem"), "gateway")


async def test_a_certificate_may_have_an_ip_address(tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path, "10.0.0.5", "fd00::7", "quire.example")
    async with serving(identity(certificates, "gateway")) as address:
        for name in ("10.0.0.5", "fd00::7", "quire.example"):
            assert not await find_obstacle(address, TLS(certificates / "ca.pem"), name)
        assert "10.0.0.6" in await find_obstacle(address, TLS(certificates / "ca.pem"), "10.0.0.6")


async def test_a_server_verifies_its_clients(certificates: Path, tmp_path: Path) -> None:
    stranger = make_certificates(tmp_path / "stranger")
    ca = certificates / "ca.pem"
    async with serving(identity(certificates, "gateway", ca)) as address:
        pair = (certificates / "client.pem", certificates / "client-key.pem")
        assert await is_served(address, TLS(ca, *pair))
        assert not await is_served(address, TLS(ca))
        unknown = (stranger / "client.pem", stranger / "client-key.pem")
        assert not await is_served(address, TLS(ca, *unknown))


async def test_changed_files_are_read_at_the_next_handshake(certificates: Path) -> None:
    ca = TLS(certificates / "ca.pem")
    async with serving(identity(certificates, "gateway")) as address:
        assert not await is_served(address, ca, "quire.example")
        make_certificates(certificates, "quire.example")
        assert await is_served(address, ca, "quire.example")


async def test_files_that_do_not_match_keep_the_former_ones(certificates: Path) -> None:
    ca = TLS(certificates / "ca.pem")
    async with serving(identity(certificates, "gateway")) as address:
        (certificates / "gateway.pem").write_bytes((certificates / "worker.pem").read_bytes())
        assert await is_served(address, ca, "gateway")
        key = (certificates / "worker-key.pem").read_bytes()
        (certificates / "gateway-key.pem").write_bytes(key)
        assert await is_served(address, ca, "worker")
        assert not await is_served(address, ca, "gateway")
        (certificates / "gateway.pem").unlink()
        assert await is_served(address, ca, "worker")


def test_files_are_read_again_once_the_process_can_open_them(certificates: Path) -> None:
    served = ServerCertificates(identity(certificates, "gateway"))
    former = served.ssl_context()
    make_certificates(certificates)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with capture_logs() as logs:
            assert [served.ssl_context() for _ in range(2)] == [former, former]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert [entry["event"] for entry in logs] == ["certificate not reloaded"]
    assert served.ssl_context() is not former


def test_the_expiry_is_that_of_the_certificate_that_is_served(
    certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while a new pair is not used because of another file."""
    clients = tmp_path / "clients.pem"
    clients.write_bytes((certificates / "ca.pem").read_bytes())
    files = ServerCertificates(identity(certificates, "gateway", clients))
    served = files.expires_at()
    clients.write_bytes(b"")
    monkeypatch.setenv("DAYS", "1")
    make_certificates(certificates)
    assert files.expires_at() == served
    clients.write_bytes((certificates / "ca.pem").read_bytes())
    assert files.expires_at() < served


async def test_a_context_of_https_follows_the_files(certificates: Path, tmp_path: Path) -> None:
    ca = certificates / "ca.pem"
    files = ServerCertificates(identity(certificates, "gateway", ca))
    connected: list[asyncio.StreamWriter] = []

    def accept(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.append(writer)
        writer.write(b"ok")

    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=files.ssl_context())
    port = server.sockets[0].getsockname()[1]

    async def responds(name: str, client: Path | None) -> bool:
        context = ssl.create_default_context(cafile=ca)
        if client is not None:
            context.load_cert_chain(client / "client.pem", client / "client-key.pem")
        try:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, ssl=context, server_hostname=name
            )
            # With TLS 1.3 a client learns only by reading that its certificate is refused.
            response = await reader.read(2)
            writer.close()
        except (ssl.SSLError, ConnectionError):
            return False
        return response == b"ok"

    assert await responds("gateway", certificates)
    assert not await responds("gateway", None)
    assert not await responds("quire.example", certificates)
    make_certificates(certificates, "quire.example")
    assert await responds("quire.example", certificates)
    # Clients of a removed authority are refused, too.
    stranger = make_certificates(tmp_path / "stranger")
    ca_of_clients = tmp_path / "clients.pem"
    ca_of_clients.write_bytes(ca.read_bytes())
    files = ServerCertificates(identity(certificates, "gateway", ca_of_clients))
    server.close()
    server = await asyncio.start_server(accept, "127.0.0.1", port, ssl=files.ssl_context())
    assert await responds("gateway", certificates)
    ca_of_clients.write_bytes((stranger / "ca.pem").read_bytes())
    assert not await responds("gateway", certificates)
    assert await responds("gateway", stranger)
    # A client that connects by address sends no name.
    assert not await responds("127.0.0.1", certificates)
    assert await responds("127.0.0.1", stranger)
    for writer in connected:
        writer.close()
    server.close()


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_resumed_session_of_a_removed_authority_is_refused(
    certificates: Path, tmp_path: Path, version: ssl.TLSVersion
) -> None:
    """A server does not verify a certificate again when a session is resumed."""
    clients = tmp_path / "clients.pem"
    clients.write_bytes((certificates / "ca.pem").read_bytes())
    context = ssl.create_default_context(cafile=certificates / "ca.pem")
    context.maximum_version = version
    context.load_cert_chain(certificates / "client.pem", certificates / "client-key.pem")

    def connect(address: str, session: ssl.SSLSession | None) -> ssl.SSLSession | None:
        """The session of a connection that is served; None if it is refused."""
        host, _, port = address.rpartition(":")
        try:
            with (
                socket.create_connection((host, int(port)), timeout=10) as plain,
                context.wrap_socket(plain, server_hostname="gateway", session=session) as secure,
            ):
                secure.sendall(frames.PREFACE)
                return secure.session if secure.recv(1) else None
        except OSError:
            return None

    async with serving(identity(certificates, "gateway", clients)) as address:
        session = await asyncio.to_thread(connect, address, None)
        assert session is not None
        clients.write_bytes((make_certificates(tmp_path / "stranger") / "ca.pem").read_bytes())
        assert await asyncio.to_thread(connect, address, session) is None


async def test_health_is_served_without_tls_at_its_own_address(
    certificates: Path, tmp_path: Path
) -> None:
    socket = f"unix:{tmp_path}/health.sock"
    tls = identity(certificates, "gateway", certificates / "ca.pem")
    async with serving(tls, socket):
        assert await is_served(socket, None)
        async with grpc.aio.insecure_channel(socket) as channel:
            other = channel.unary_unary("/quire.v1.ModelService/ListModels")
            with pytest.raises(grpc.aio.AioRpcError, match="UNIMPLEMENTED"):
                await other(b"", timeout=10)


def test_files_that_cannot_be_used_are_named(certificates: Path, tmp_path: Path) -> None:
    missing = tmp_path / "missing.pem"
    cert, key = certificates / "gateway.pem", certificates / "gateway-key.pem"
    secret, pipe = tmp_path / "secret.pem", tmp_path / "pipe.pem"
    encrypt = ["openssl", "pkey", "-in", key, "-aes256", "-passout", "pass:secret", "-out", secret]
    subprocess.run(encrypt, check=True, capture_output=True)
    os.mkfifo(pipe)
    for wrong, message in (
        (ServerTLS(missing, key), f"{missing} cannot be read: No such file or directory"),
        (ServerTLS(cert, missing), f"{missing} cannot be read: No such file or directory"),
        (
            ServerTLS(cert, certificates / "worker-key.pem"),
            f"{cert} and {certificates / 'worker-key.pem'} are no certificate and its key: "
            "key values mismatch",
        ),
        (ServerTLS(cert, key, key), f"{key} has no certificates of authorities"),
        (ServerTLS(cert, secret), f"{secret} has a password, with which a service could not"),
        (ServerTLS(pipe, key), f"{pipe} cannot be read: it is a pipe or a device"),
        (ServerTLS(cert, key, pipe), f"{pipe} cannot be read: it is a pipe or a device"),
    ):
        with pytest.raises(TLSError) as refused:
            ServerCertificates(wrong)
        assert message in str(refused.value)
    with pytest.raises(TLSError, match="a client's certificate and its key go together"):
        TLS(certificates / "ca.pem", cert)
    with pytest.raises(TLSError, match=f"{missing} cannot be read"):
        TLS(missing)


def test_a_channel_is_not_opened_with_a_file_that_is_empty(
    certificates: Path, tmp_path: Path
) -> None:
    """As between two writes. gRPC would end the process, or trust the system's authorities."""
    names = ("ca.pem", "gateway.pem", "gateway-key.pem")
    ca, cert, key = (Path(shutil.copy(certificates / name, tmp_path)) for name in names)
    tls = TLS(ca, cert, key)
    for file in (ca, cert, key):
        contents = file.read_bytes()
        file.write_bytes(b"")
        with pytest.raises(TLSError, match=f"{file} is empty"):
            tls.credentials()
        file.write_bytes(contents)
    assert tls.credentials()


def test_a_channel_is_not_opened_with_a_file_that_is_written_in_part(
    certificates: Path, tmp_path: Path
) -> None:
    """gRPC would keep it for as long as the channel, and time out."""
    names = ("ca.pem", "gateway.pem", "gateway-key.pem", "worker-key.pem")
    ca, cert, key, other = (Path(shutil.copy(certificates / name, tmp_path)) for name in names)
    tls = TLS(ca, cert, key)
    for file in (ca, cert, key):
        contents = file.read_bytes()
        file.write_bytes(contents[: len(contents) // 2])
        with pytest.raises(TLSError, match=f"{file}.*: not valid PEM$"):
            tls.credentials()
        file.write_bytes(contents)
    # The certificate is written before its key, or after it.
    other.rename(key)
    with pytest.raises(TLSError, match="key values mismatch"):
        tls.credentials()


def test_a_certificate_that_clients_refuse_is_logged(
    certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = certificates / "gateway.pem", certificates / "gateway-key.pem"
    command = ["openssl", "x509", "-noout", "-startdate", "-enddate", "-in", str(cert)]
    dates = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    begin, end = (ssl.cert_time_to_seconds(line.split("=")[1]) for line in dates.splitlines())
    clock = SimpleNamespace(now=0.0)
    clock.time = clock.monotonic = lambda: clock.now
    monkeypatch.setattr(tls, "time", clock)
    day, logged = 86400, []
    for clock.now, event in (
        (begin - day, ("error", "certificate not valid yet")),
        (begin + day, None),
        (end - 15 * day, None),
        (end - 13 * day, ("warning", "certificate expires soon")),
        (end + 1, ("error", "certificate has expired")),
    ):
        with capture_logs() as logs:
            files = ServerCertificates(ServerTLS(cert, key))
            for _ in range(3):
                files.ssl_context()
        assert [(one["log_level"], one["event"]) for one in logs] == [event] * (event is not None)
        logged += logs
    at = [datetime.fromisoformat(one.get("begin") or one["end"]).timestamp() for one in logged]
    assert at == [begin, end, end]
    registry = CollectorRegistry()
    export_expiry(registry, files)
    assert registry.get_sample_value("quire:tls_certificate_expiry_timestamp_seconds") == end
    # Again after an hour, and not after a renewal.
    with capture_logs() as logs:
        clock.now += 3601
        files.ssl_context()
        clock.now = begin + day
        files.ssl_context()
    assert [one["event"] for one in logs] == ["certificate has expired"]
    # A date after 2049 has another form. The certificate of an authority is signed by itself.
    far = certificates / "far.pem"
    make = ["openssl", "req", "-x509", "-new", "-key", key, "-days", "20000", "-subj", "/CN=far"]
    subprocess.run([*make, "-out", far], check=True, capture_output=True)
    clock.now = begin + 19_999 * day
    with capture_logs() as logs:
        ServerCertificates(ServerTLS(far, key)).ssl_context()
    assert [one["event"] for one in logs] == ["certificate expires soon"]


_FAILED_HANDSHAKE = """
import asyncio
import sys
from pathlib import Path
from quire.service.channels import PUBLIC_MESSAGE_BYTES
from quire.service.health import Health
from quire.service.http2.limits import Limits
from quire.service.http2.server import Server
from quire.service.lifecycle import start_server
from quire.service.metrics.server import export_expiry
from quire.service.tls import ServerCertificates, ServerTLS

async def main():
    folder = Path(sys.argv[1])
    tls = ServerTLS(folder / "gateway.pem", folder / "gateway-key.pem", None)
    server = Server(Limits(PUBLIC_MESSAGE_BYTES))
    address = await start_server(
        server, "127.0.0.1:0", (), Health(()), certificates=ServerCertificates(tls, "h2")
    )
    reader, writer = await asyncio.open_connection(*address.split(":"))
    writer.write(b"GET / HTTP/1.1\\r\\n\\r\\n")
    while await reader.read(1024):
        pass
    await server.stop(None)

asyncio.run(main())
"""


def test_a_failed_handshake_is_not_printed(certificates: Path) -> None:
    command = [sys.executable, "-c", _FAILED_HANDSHAKE, str(certificates)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert not ended.stderr
