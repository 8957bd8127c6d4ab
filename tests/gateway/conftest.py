import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import gateway_tokenizers
import grpc
import httpx2
import pytest
from gateway_fake_scheduler import FakeScheduler
from gateway_stack import Stack
from gateway_violations import CheckedInterceptor, CheckedSize
from grpc_health.v1 import health_pb2
from http_client import Http

from gateway_svc import server
from gateway_svc.server import Gateway
from gateway_svc.settings import GatewaySettings
from quire.service.channels import channel_options

CHAT_TEMPLATE = """{{ bos_token }}{% for message in messages %}
{% if message.role not in ["system", "user", "assistant"] %}
{{ raise_exception("no role " ~ message.role) }}
{% endif %}
<|{{ message.role }}|>{{ message.content }}
{% endfor %}
{% if add_generation_prompt %}
<|assistant|>
{% endif %}
"""
HTTP_FIXTURES = {"http", "guarded"}


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = gateway_tokenizers.byte_level()
    tokenizer.save(str(folder / "tokenizer.json"))
    eos = tokenizer.token_to_id(gateway_tokenizers.EOS)
    config = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [eos]}))
    names = {"bos_token": {"content": gateway_tokenizers.BOS}, "eos_token": gateway_tokenizers.EOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


@pytest.fixture(autouse=True)
def checked_violations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every violation that any test of the gateway provokes names a field of the request."""
    monkeypatch.setattr(server, "CallInterceptor", CheckedInterceptor)
    monkeypatch.setattr(server, "RequestSize", CheckedSize)


@pytest.fixture
def http_listen(request: pytest.FixtureRequest) -> str | None:
    """Only a test that uses HTTP waits for its server to start and stop."""
    return "127.0.0.1:0" if HTTP_FIXTURES & {*request.fixturenames} else None


@pytest.fixture
def settings_for(model_folder: Path, http_listen: str | None) -> Callable[..., GatewaySettings]:
    def build(**changes: object) -> GatewaySettings:
        values = {
            "listen": "127.0.0.1:0",
            "http_listen": http_listen,
            "model": str(model_folder),
            "served_model_name": "tiny",
            "drain_grace_s": 0.0,
        }
        return GatewaySettings(**{**values, **changes})

    return build


@pytest.fixture
async def stack(settings_for: Callable[..., GatewaySettings]) -> AsyncIterator[Stack]:
    scheduler = FakeScheduler()
    port = await scheduler.start()
    # The interval is for the scheduler: its effect is not here.
    settings = settings_for(
        scheduler=f"127.0.0.1:{port}", max_queued_tokens=20_000, stream_interval=3
    )
    gateway = Gateway(settings)
    address = await gateway.start()
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        stack = Stack(gateway, scheduler, port, address, channel)
        await asyncio.wait_for(stack.wait_for_status(health_pb2.HealthCheckResponse.SERVING), 10)
        yield stack
        await asyncio.wait_for(gateway.calls.wait_until_idle(), 5)
        assert stack.is_idle()
    await gateway.stop()
    await scheduler.stop()


@pytest.fixture
async def http(stack: Stack) -> AsyncIterator[Http]:
    assert stack.gateway.http is not None
    async with httpx2.AsyncClient(base_url=f"http://{stack.gateway.http.address}") as client:
        yield Http(stack, client)
        await asyncio.wait_for(stack.gateway.http.requests.wait_until_idle(), 5)
