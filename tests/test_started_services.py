"""The modules that started services load: gateway and scheduler run without torch."""

import asyncio
import importlib.util
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from google.protobuf import descriptor_pool, json_format, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from quire.v1 import tokenizer_pb2, tokenizer_pb2_grpc

HEAVY = {"torch", "transformers", "triton", "worker_svc", "kernels"}
# Runs a service as `python -m` does, and writes the names of its loaded modules when it exits.
RUNNER = """
import atexit, json, pathlib, runpy, sys
service, modules = sys.argv[1:3]
sys.argv = [service, *sys.argv[3:]]
atexit.register(lambda: pathlib.Path(modules).write_text(json.dumps(sorted(sys.modules))))
runpy.run_module(service, run_name="__main__", alter_sys=True)
"""


@asynccontextmanager
async def _started(service: str, folder: Path, *flags: str) -> AsyncIterator[grpc.aio.Channel]:
    """A service process and a channel to it; drained at the end."""
    address = folder / "address"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", RUNNER, service, str(folder / "modules")),
        *("--listen", f"unix:{folder / 'socket'}", "--address-file", str(address), *flags),
    )
    try:
        # The channel waits until the socket exists.
        async with grpc.aio.insecure_channel(
            f"unix:{folder / 'socket'}",
            options=[("grpc.max_reconnect_backoff_ms", 200)],
        ) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            response = await stub.Check(
                health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=60
            )
            assert response.status == health_pb2.HealthCheckResponse.SERVING
            assert address.read_text() == f"unix:{folder / 'socket'}"
            yield channel
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.wait(), 30)
    assert process.returncode == 0


def _loaded(folder: Path) -> set[str]:
    """The packages that a service has loaded; without traces, not their export. Redis' client loads
    OpenTelemetry's metrics wherever they are installed."""
    names = set(json.loads((folder / "modules").read_text()))
    assert {"opentelemetry.sdk.trace", "opentelemetry.exporter"} & names == set()
    return {name.partition(".")[0] for name in names}


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    tokenizer = Tokenizer(WordLevel({"<unk>": 0, "</s>": 1, "hello": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"model_type": "llama", "vocab_size": 3, "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 1}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return folder


async def test_the_gateway_tokenizes_without_torch(tmp_path: Path, tokenizer_folder: Path) -> None:
    assert importlib.util.find_spec("torch"), "needs torch to be installed"
    flags = ["--model", str(tokenizer_folder), "--scheduler", f"unix:{tmp_path / 'no-scheduler'}"]
    async with _started("gateway_svc", tmp_path, *flags) as channel:
        response = await tokenizer_pb2_grpc.TokenizerServiceStub(channel).Tokenize(
            tokenizer_pb2.TokenizeRequest(text="hello hello"), timeout=30
        )
        assert list(response.token_ids) == [2, 2]
    assert _loaded(tmp_path) & (HEAVY | {"redis", "scheduler_svc"}) == set()
    assert "gateway_svc" in _loaded(tmp_path)


async def test_the_scheduler_serves_without_torch(tmp_path: Path) -> None:
    assert importlib.util.find_spec("torch"), "needs torch to be installed"
    no_worker = f"unix:{tmp_path / 'no-worker'}"
    flags = ["--redis-url", f"unix://{tmp_path / 'no-redis'}", "--workers", no_worker]
    async with _started("scheduler_svc", tmp_path, *flags):
        pass
    assert _loaded(tmp_path) & (HEAVY | {"tokenizers", "httpx2", "gateway_svc"}) == set()
    assert "scheduler_svc" in _loaded(tmp_path)


async def test_a_generic_client_needs_only_the_address(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    flags = ["--model", str(tokenizer_folder), "--scheduler", f"unix:{tmp_path / 'no-scheduler'}"]
    async with _started("gateway_svc", tmp_path, *flags):
        service = "quire.v1.TokenizerService"
        services, response = await asyncio.to_thread(
            _call_by_reflection, f"unix:{tmp_path / 'socket'}", service, "Tokenize"
        )
    assert {"quire.v1.InferenceService", "quire.v1.ModelService", service} <= set(services)
    assert response == {"tokenIds": [2, 2]}


def _call_by_reflection(
    target: str, service: str, method: str
) -> tuple[tuple[str, ...], dict[str, object]]:
    """The server's services, and a method's response to a text; uses no generated stubs."""
    with grpc.insecure_channel(target) as channel:
        reflection = ProtoReflectionDescriptorDatabase(channel)
        pool = descriptor_pool.DescriptorPool(reflection)
        described = pool.FindServiceByName(service).methods_by_name[method]
        request = message_factory.GetMessageClass(described.input_type)()
        call = channel.unary_unary(
            f"/{service}/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=message_factory.GetMessageClass(described.output_type).FromString,
        )
        response = call(json_format.ParseDict({"text": "hello hello"}, request), timeout=30)
        return tuple(reflection.get_services()), json_format.MessageToDict(response)
