"""Mutual TLS between clients, a gateway, a scheduler and a worker; TLS to Redis."""

import asyncio
import math
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import httpx2
import pytest
from certificates import make_certificates
from typer.testing import CliRunner
from waiting import until

from quire.cli import app
from quire.client.client import Client
from quire.client.errors import QuireError
from quire.client.health_probe import is_serving
from quire.client.operations import Operations
from quire.client.sampling_params import SamplingParams
from quire.launcher.redis import EmbeddedRedis
from quire.launcher.stack import LocalStack
from quire.llm import LLM
from quire.service.tls import TLS
from scheduler_svc.store.connection import Connection
from scheduler_svc.store.errors import StoreUnavailable

SHORT = SamplingParams(max_tokens=4, ignore_eos=True)


class TLSRelay:
    """Accepts TLS and relays the bytes to a unix socket, as a Redis with TLS would."""

    def __init__(self, certificates: Path, socket_path: Path) -> None:
        self.port = 0
        self._socket_path = socket_path
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificates / "redis.pem", certificates / "redis-key.pem")
        self._context.load_verify_locations(certificates / "ca.pem")
        self._context.verify_mode = ssl.CERT_REQUIRED
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> Self:
        self._thread.start()
        listening = asyncio.start_server(self._relay, "127.0.0.1", 0, ssl=self._context)
        server = asyncio.run_coroutine_threadsafe(listening, self._loop).result(10)
        self.port = server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *exception: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream, downstream = await asyncio.open_unix_connection(self._socket_path)
        await asyncio.gather(_copy(reader, downstream), _copy(upstream, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    writer.close()


@dataclass
class Services:
    """Addresses of the services, and the folder of their certificates."""

    gateway: str
    http: str
    scheduler: str
    worker: str
    certificates: Path

    @property
    def tls(self) -> TLS:
        folder = self.certificates
        return TLS(folder / "ca.pem", folder / "client.pem", folder / "client-key.pem")


def _flags(folder: Path, service: str, link: str | None = None) -> list[str]:
    """The flags of mutual TLS, as a server and as a client of `link`."""
    own = {"cert": f"{service}.pem", "key": f"{service}-key.pem"}
    flags = [f"--tls-{k}={folder / v}" for k, v in {**own, "client-ca": "ca.pem"}.items()]
    if link is not None:
        flags += [f"--{link}-tls-{k}={folder / v}" for k, v in {**own, "ca": "ca.pem"}.items()]
    return flags


def _redis_files(folder: Path) -> str:
    """The parameters of mutual TLS in a URL of Redis."""
    files = {"ca_certs": "ca.pem", "certfile": "client.pem", "keyfile": "client-key.pem"}
    return "&".join(f"ssl_{name}={folder / file}" for name, file in files.items())


def _start(stack: ExitStack, folder: Path, service: str, *flags: str) -> str:
    """Start a service on a free port; return its address."""
    file = folder / f"{service}.address"
    command = [sys.executable, "-m", f"{service}_svc", "--listen=127.0.0.1:0", *flags]
    process = subprocess.Popen([*command, f"--address-file={file}"])
    stack.callback(process.wait, 30)
    stack.callback(process.terminate)
    asyncio.run(until(file.exists, f"the {service} to listen", 60))
    return file.read_text()


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    folder = make_certificates(tmp_path_factory.mktemp("tls") / "certificates")
    private = tempfile.TemporaryDirectory(prefix="quire-")
    with ExitStack() as stack:
        redis = stack.enter_context(EmbeddedRedis(Path(stack.enter_context(private))))
        relay = stack.enter_context(TLSRelay(folder, redis.socket_path))
        query = _redis_files(folder)
        worker = _start(stack, folder, "worker", "--engine=sim", *_flags(folder, "worker"))
        scheduler = _start(
            stack,
            folder,
            "scheduler",
            f"--redis-url=rediss://localhost:{relay.port}/0?{query}",
            # The certificate has this name and not the address that it resolves to.
            f"--workers={worker.replace('127.0.0.1', 'localhost')}",
            *_flags(folder, "scheduler", "worker"),
        )
        health, http_file = f"unix:{private.name}/health.sock", folder / "http.address"
        gateway = _start(
            stack,
            folder,
            "gateway",
            *("--model=demo/model", "--http-listen=127.0.0.1:0"),
            *(f"--http-address-file={http_file}", f"--health-listen={health}"),
            f"--scheduler={scheduler}",
            *_flags(folder, "gateway", "scheduler"),
        )
        asyncio.run(until(lambda: _is_serving(health, None), "the gateway to be ready", 60))
        yield Services(gateway, http_file.read_text(), scheduler, worker, folder)


def _is_serving(target: str, tls: TLS | None) -> bool:
    try:
        return is_serving(target, "ready", 2.0, tls)
    except QuireError:
        return False


def test_requests_pass_through_all_services(services: Services) -> None:
    with Client(services.gateway, tls=services.tls) as client:
        assert client.generate([1, 2, 3], SHORT).usage.completion_tokens == 4
        deltas = client.stream_generate([1], SHORT)
        assert sum(len(one.token_ids) for delta in deltas for one in delta.outputs) == 4
    with LLM(target=services.gateway, tls=services.tls) as llm:
        assert len(llm.generate([[1, 2]] * 3, SHORT)) == 3
    with Operations(services.scheduler, services.tls) as operations:
        assert len(operations.status(False, 5.0).workers) == 1


def test_no_service_serves_a_client_without_a_certificate(services: Services) -> None:
    ca = services.certificates / "ca.pem"
    for address in (services.gateway, services.scheduler, services.worker):
        assert _is_serving(address, services.tls)
        assert not _is_serving(address, TLS(ca))
        assert not _is_serving(address, None)
    with (
        Client(services.gateway, tls=TLS(ca), resume_timeout_s=0) as client,
        pytest.raises(QuireError, match="no server responds"),
    ):
        client.generate([1], SHORT)


def test_a_client_at_the_https_port_ends_with_a_hint(services: Services) -> None:
    with (
        Client(services.http, tls=services.tls, resume_timeout_s=math.inf) as client,
        pytest.raises(QuireError, match="a server of HTTP/1"),
    ):
        client.generate([1], SHORT)


def test_http_has_the_same_certificates(services: Services) -> None:
    context = ssl.create_default_context(cafile=services.certificates / "ca.pem")
    url = f"https://{services.http}/v1/models"
    with pytest.raises(httpx2.TransportError), httpx2.Client(verify=context) as client:
        client.get(url)
    folder = services.certificates
    context.load_cert_chain(folder / "client.pem", folder / "client-key.pem")
    with httpx2.Client(verify=context) as client:
        assert client.get(url).json()["data"][0]["id"] == "demo/model"


async def test_each_connection_to_redis_reads_the_files_again(tmp_path: Path) -> None:
    """A certificate that was renewed must not be used until it expires."""
    folder = make_certificates(tmp_path / "certificates")
    private = tempfile.TemporaryDirectory(prefix="quire-")
    with (
        private as path,
        EmbeddedRedis(Path(path)) as redis,
        TLSRelay(folder, redis.socket_path) as relay,
    ):
        url = f"rediss://localhost:{relay.port}/0?{_redis_files(folder)}"
        connection = Connection.to(url, timeout_s=5)
        assert await connection.execute("PING") == b"PONG"
        (folder / "client.pem").rename(folder / "old.pem")
        connection.reopen()
        with pytest.raises(StoreUnavailable, match="No such file"):
            await connection.execute("PING")
        (folder / "old.pem").rename(folder / "client.pem")
        assert await connection.execute("PING") == b"PONG"
        await connection.close()


@pytest.mark.slow
def test_a_private_stack_ignores_the_access_settings_of_the_environment(
    services: Services, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = services.certificates
    keys = tmp_path / "keys.yaml"
    keys.write_text("- {name: someone, keys: [" + "0" * 64 + "]}\n")
    monkeypatch.setenv("QUIRE_GATEWAY_API_KEYS", str(keys))
    monkeypatch.setenv("QUIRE_GATEWAY_TLS_CERT", str(folder / "gateway.pem"))
    monkeypatch.setenv("QUIRE_GATEWAY_TLS_KEY", str(folder / "gateway-key.pem"))
    with LLM("demo/model", engine="sim") as llm:
        assert llm.generate([1, 2], SHORT)[0].usage.completion_tokens == 4
    settings = {"QUIRE_WORKER_ENGINE": "sim", "QUIRE_GATEWAY_API_KEYS": None}
    with (
        LocalStack("demo/model", settings=settings) as stack,
        Client(stack.address, tls=TLS(folder / "ca.pem")) as client,
    ):
        assert client.generate([1, 2], SHORT).usage.completion_tokens == 4


@pytest.mark.slow
def test_the_command_line_connects_with_tls(services: Services) -> None:
    folder = services.certificates
    options = [f"--tls-ca={folder / 'ca.pem'}", f"--tls-cert={folder / 'client.pem'}"]
    options.append(f"--tls-key={folder / 'client-key.pem'}")
    runner = CliRunner()
    for command in (
        ["models", "--target", services.gateway],
        ["health", "--target", services.gateway],
        ["generate", "--target", services.gateway, "--max-tokens", "2", "a b"],
        ["status", "--target", services.scheduler, "--once", "--interval", "0.05"],
    ):
        assert runner.invoke(app, [*options, *command]).exit_code == 0, command
    refused = runner.invoke(app, [*options[:1], "models", "--target", services.gateway])
    assert refused.exit_code == 1
    assert "a server with TLS closes connections without it or without a cert" in refused.output
    refused = runner.invoke(app, ["--tls-ca=/nowhere", "models"])
    assert refused.exit_code == 2
    assert "/nowhere cannot be read: No such file or directory" in refused.output
    refused = runner.invoke(app, ["--tls-server-name=x", "models"])
    assert refused.exit_code == 2


def test_an_untrusted_certificate_is_not_retried(services: Services) -> None:
    folder = services.certificates
    pair = (folder / "client.pem", folder / "client-key.pem")
    authority = "; name the file of its authority: --tls-ca, or TLS(ca=...) in Python"
    for tls, message, hint in (
        (TLS(None, *pair), "no trusted certificate at ", authority),
        (
            TLS(folder / "ca.pem", *pair, server_name="other"),
            "no certificate for this name at ",
            "",
        ),
    ):
        with Client(services.gateway, tls=tls) as client, pytest.raises(QuireError) as refused:
            client.generate([1], SHORT)
        assert str(refused.value).startswith(f"UNAVAILABLE: {message}{services.gateway}")
        assert str(refused.value).endswith(f"){hint}")
        assert not refused.value.resumable
