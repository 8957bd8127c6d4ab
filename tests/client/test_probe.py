"""The probe of container engines, as a process: what it prints, and its exit status."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

STATUS = health_pb2.HealthCheckResponse


@pytest.fixture
def address() -> Iterator[str]:
    """A server whose process serves, and which is not ready."""
    servicer = health.HealthServicer()
    servicer.set("", STATUS.SERVING)
    servicer.set("ready", STATUS.NOT_SERVING)
    server = grpc.server(ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


def probe(*arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "quire.probe", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == ""
    return done.returncode, done.stderr.strip()


def test_what_serves_ends_the_probe_with_zero_and_without_a_word(address: str) -> None:
    assert probe(address, "") == (0, "")


def test_what_does_not_serve_is_named(address: str) -> None:
    assert probe(address, "ready") == (1, f"{address}: ready is not serving")


def test_an_unknown_service_and_a_missing_server_have_the_code_of_the_call(address: str) -> None:
    status, reason = probe(address, "other")
    assert status == 1
    assert reason.startswith(f"{address}: NOT_FOUND")
    status, reason = probe("127.0.0.1:1", "ready")
    assert status == 1
    assert reason.startswith("127.0.0.1:1: UNAVAILABLE: ")


def test_other_arguments_are_refused_with_the_usage() -> None:
    assert probe("127.0.0.1:1") == (1, "usage: python -m quire.probe HOST:PORT SERVICE")


def test_the_probe_imports_nothing_that_takes_long() -> None:
    code = "import sys, quire.probe; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"typer", "pydantic", "structlog", "rich"} & set(done.stdout.split())
