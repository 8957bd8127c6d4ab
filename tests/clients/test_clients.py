"""Runs the clients of every language against two gateways; see `make test-clients`."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from breaking_proxy import BreakingProxy
from client_programs import PROGRAMS, ROOT, SOURCES
from grpc_servers import server_options

from quire.client.client import Client
from quire.client.prompts import Prompt
from quire.client.sampling_params import SamplingParams
from quire.launcher.stack import LocalStack
from quire.v1 import inference_pb2
from quire.v1.inference_pb2_grpc import (
    InferenceServiceServicer,
    add_InferenceServiceServicer_to_server,
)

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]

MODEL = str(ROOT / "demo" / "model")
SETTINGS = {
    "QUIRE_WORKER_ENGINE": "sim",
    # Slow enough to be cancelled, or broken off, before the end.
    "QUIRE_WORKER_SIM_STEP_MS": "10",
    "QUIRE_WORKER_NUM_BLOCKS": "1025",
}
# In the middle of the longest output of the programs.
BROKEN_AFTER_BYTES = 4_000
TOP_P = "top_p: is 2; must be above 0 and at most 1"
QUESTION = [{"role": "user", "content": "What does this function return?"}]
LARGE_TEXT = "word " * 2**20
EXPECTED_PARAMS = SamplingParams(max_tokens=32, seed=1)


@dataclass(frozen=True)
class Built:
    """A client that is ready to run."""

    command: Sequence[str]
    is_grpc: bool

    def run(self, step: str, *addresses: str) -> str:
        targets = addresses if self.is_grpc else [f"http://{address}" for address in addresses]
        done = subprocess.run(
            [*self.command, step, *targets], cwd=ROOT, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    with LocalStack(MODEL, num_gateways=2, http_listen="127.0.0.1:0", settings=SETTINGS) as running:
        yield running


@pytest.fixture(scope="module", params=PROGRAMS)
def client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    program = PROGRAMS[request.param]
    if missing := program.missing():
        pytest.skip(f"{request.param}: not installed: {', '.join(missing)}")
    folder = tmp_path_factory.mktemp(request.param)
    return Built(program.build(folder), program.is_grpc)


@pytest.fixture
def gateways(stack: LocalStack, client: Built) -> list[str]:
    return stack.addresses if client.is_grpc else stack.http_addresses


class Verbose(InferenceServiceServicer):
    def Generate(self, request, context):  # noqa: N802
        return inference_pb2.GenerateResponse(choices=[inference_pb2.Choice(text=LARGE_TEXT)])


@pytest.fixture
def verbose_gateway() -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(1), options=server_options())
    add_InferenceServiceServicer_to_server(Verbose(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


@pytest.fixture
def lonely_gateway(client: Built, tmp_path: Path) -> Iterator[str]:
    """The address of a gateway without a scheduler."""
    file = tmp_path / "address"
    listen = ["--listen=127.0.0.1:0", "--http-listen=127.0.0.1:0"]
    written = f"--address-file={file}" if client.is_grpc else f"--http-address-file={file}"
    options = [f"--model={MODEL}", "--scheduler=127.0.0.1:1", "--scheduler-wait-s=0"]
    gateway = subprocess.Popen([sys.executable, "-m", "gateway_svc", *listen, written, *options])
    try:
        deadline = time.monotonic() + 30
        while not (file.exists() and file.read_text().strip()):
            assert gateway.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield file.read_text().strip()
    finally:
        gateway.terminate()
        gateway.wait(30)


def generated(stack: LocalStack, prompt: Prompt, params: SamplingParams) -> str:
    with Client(stack.address) as reference:
        return reference.generate(prompt, params).outputs[0].text + "\n"


def test_the_client_streams(stack: LocalStack, client: Built, gateways: list[str]) -> None:
    expected = generated(stack, "Return the number of", EXPECTED_PARAMS)
    assert client.run("stream", *gateways) == expected


def test_the_client_chats(stack: LocalStack, client: Built, gateways: list[str]) -> None:
    assert client.run("chat", *gateways) == generated(stack, QUESTION, EXPECTED_PARAMS)


def test_the_client_receives_large_responses(client: Built, verbose_gateway: str) -> None:
    """Larger than gRPC's default limit."""
    if not client.is_grpc:
        pytest.skip("HTTP has no limit")
    assert client.run("chat", verbose_gateway) == LARGE_TEXT + "\n"


def test_the_client_cancels(client: Built, gateways: list[str]) -> None:
    assert client.run("cancel", *gateways).lower() == "cancelled\n"


def test_the_client_resumes_after_its_connection_breaks(
    stack: LocalStack, client: Built, gateways: list[str]
) -> None:
    params = SamplingParams(max_tokens=200, seed=1, ignore_eos=True)
    expected = generated(stack, "Open the file", params)
    with BreakingProxy(gateways[0], BROKEN_AFTER_BYTES) as proxy:
        assert client.run("resume", proxy.address, gateways[1]) == expected
        assert proxy.num_broken >= 1


def test_the_client_shows_the_details_of_errors(client: Built, gateways: list[str]) -> None:
    printed = client.run("errors", *gateways)
    if client.is_grpc:
        assert re.fullmatch(
            rf"Invalid_?Argument: sampling_params\.{TOP_P}\n"
            r"BadRequest: sampling_params\.top_p\nErrorInfo: TOP_P_OUT_OF_RANGE\n",
            printed,
            re.IGNORECASE,
        )
    else:
        assert printed == f"400: {TOP_P}\nparam: top_p\ncode: top_p_out_of_range\n"


def test_the_client_shows_when_to_retry(client: Built, lonely_gateway: str) -> None:
    printed = client.run("errors", lonely_gateway)
    status, *_, retry = printed.splitlines()
    assert re.match(r"unavailable: |503: ", status, re.IGNORECASE)
    assert re.fullmatch(r"RetryInfo: \d+ ms|retry-after: \d+ s", retry)


def test_every_program_is_listed_with_its_language() -> None:
    readme = (SOURCES / "README.md").read_text()
    files = {
        path.relative_to(SOURCES).as_posix()
        for pattern in ("*/*client.*", "*/main.go")
        for path in SOURCES.glob(pattern)
    }
    assert files == set(re.findall(r"\]\(([\w/]+\.\w+)\)", readme))
