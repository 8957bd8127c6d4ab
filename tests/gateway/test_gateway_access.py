"""API keys and tenants through the gateway's gRPC API."""

import asyncio
import re
import socket
import subprocess
import sys
import traceback
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx2
import pytest
from gateway_fake_scheduler import FakeScheduler
from gateway_stack import Stack, info_of
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from structlog.testing import capture_logs
from waiting import until

from gateway_svc.access.authentication import Authentication
from gateway_svc.access.tenant import Tenant, TenantLimits
from gateway_svc.generation.tenant_limits import background_window_s
from gateway_svc.server import Gateway
from gateway_svc.settings import GatewaySettings
from quire.client.async_client import AsyncClient
from quire.client.client import Client
from quire.client.errors import QuireError
from quire.internal.v1 import logits_pb2
from quire.service.api_keys import hash_key, header_value, new_key
from quire.service.channels import channel_options
from quire.service.errors import RequestError
from quire.v1 import inference_pb2 as pb
from quire.v1 import model_pb2, tokenizer_pb2
from quire.v1.beam_search_pb2 import BeamSearchRequest

ROOT = Path(__file__).resolve().parents[2]
SettingsFor = Callable[..., GatewaySettings]
LIMITS = """
  weight: 2.5
  priority: {min: 1, max: 3}
  limits: {requests_per_minute: 60, resumable_requests: 0, output_tokens: 12, resume_window_s: 30}
"""


@dataclass
class Keys:
    """A keys file with the tenants alpha, which has limits, beta and sharing, an administrator."""

    path: Path
    alpha: str
    beta: str
    sharing: str

    def metadata(self, key: str) -> tuple[tuple[str, str], ...]:
        return (("authorization", header_value(key)),)


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    keys = Keys(tmp_path / "keys.yaml", new_key(), new_key(), new_key())
    alpha, beta, sharing = (hash_key(key).hex() for key in (keys.alpha, keys.beta, keys.sharing))
    keys.path.write_text(
        f"- name: alpha\n  keys: [{alpha}]{LIMITS}"
        f"- {{name: beta, keys: [{beta}]}}\n"
        f"- {{name: sharing, keys: [{sharing}], share_prefixes: true, admin: true}}\n"
    )
    return keys


@pytest.fixture
async def guarded(settings_for: SettingsFor, keys: Keys) -> AsyncIterator[Stack]:
    """A gateway with keys."""
    scheduler = FakeScheduler()
    port = await scheduler.start()
    gateway = Gateway(settings_for(scheduler=f"127.0.0.1:{port}", api_keys=keys.path))
    address = await gateway.start()
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        stack = Stack(gateway, scheduler, port, address, channel)
        async with asyncio.timeout(10):
            await stack.wait_for_status(health_pb2.HealthCheckResponse.SERVING)
        yield stack
        # A client may have its response before the call has ended.
        async with asyncio.timeout(5):
            await gateway.calls.wait_until_idle()
        assert stack.is_idle()
    await gateway.stop()
    await scheduler.stop()


async def refusal(call: grpc.aio.Call) -> tuple[grpc.StatusCode, str, str]:
    """Status, reason and message of a refused call."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    error = refused.value
    return error.code(), info_of(error).reason, error.details() or ""


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (None, "MISSING_KEY"),
        ("", "MISSING_KEY"),
        ("Bearer ", "MISSING_KEY"),
        ("Basic abc", "MISSING_KEY"),
        ("Bearer quire-wrong", "UNKNOWN_KEY"),
    ],
)
async def test_calls_without_a_known_key_are_refused(
    guarded: Stack, header: str | None, reason: str
) -> None:
    metadata = () if header is None else (("authorization", header),)
    for method, request in (
        (guarded.inference.Generate, pb.GenerateRequest(text="The")),
        (guarded.inference.CancelGenerate, pb.CancelGenerateRequest(request_id="x")),
        (guarded.tokenizer.Tokenize, tokenizer_pb2.TokenizeRequest(text="The")),
        (guarded.models.ListModels, model_pb2.ListModelsRequest()),
    ):
        code, found, message = await refusal(method(request, metadata=metadata))
        assert (code, found) == (grpc.StatusCode.UNAUTHENTICATED, reason)
        assert "wrong" not in message
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await anext(
            aiter(guarded.inference.StreamGenerate(pb.StreamGenerateRequest(), metadata=metadata))
        )
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("header", [None, header_value("quire-wrong")])
def test_refused_calls_leave_nothing_behind(header: str | None) -> None:
    """An error has the frames in which it was raised, with what they have of the call."""
    authentication = Authentication({})
    num_frames = []
    for _ in range(3):
        with pytest.raises(RequestError) as caught:
            authentication.authenticate(header)
        num_frames.append(len(list(traceback.walk_tb(caught.value.__traceback__))))
    assert len(set(num_frames)) == 1


async def test_health_needs_no_key(guarded: Stack) -> None:
    response = await guarded.health.Check(health_pb2.HealthCheckRequest(service="ready"))
    assert response.status == health_pb2.HealthCheckResponse.SERVING


async def test_reflection_needs_an_administrator(guarded: Stack, keys: Keys) -> None:
    reflection = reflection_pb2_grpc.ServerReflectionStub(guarded.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")

    async def no_request() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
        # A client that writes to a call that has just been refused may see INTERNAL instead.
        await asyncio.Event().wait()
        yield request

    async def codes(metadata: tuple[tuple[str, str], ...]) -> grpc.StatusCode:
        call = reflection.ServerReflectionInfo(no_request(), metadata=metadata)
        with pytest.raises(grpc.aio.AioRpcError):
            _ = [response async for response in call]
        return await call.code()

    assert await codes(()) is grpc.StatusCode.UNAUTHENTICATED
    assert await codes(keys.metadata(keys.beta)) is grpc.StatusCode.PERMISSION_DENIED
    call = reflection.ServerReflectionInfo(iter([request]), metadata=keys.metadata(keys.sharing))
    [response] = [response async for response in call]
    assert response.list_services_response.service


async def test_a_submission_has_the_tenant(guarded: Stack, keys: Keys) -> None:
    request = pb.GenerateRequest(text="The", cache_salt="s")
    seen = []
    for key in (keys.alpha, keys.beta, keys.sharing):
        call = guarded.inference.Generate(request, metadata=keys.metadata(key))
        seen.append(await guarded.scheduler.serve_one(guarded.encode("fox")))
        await call
    assert [one.principal for one in seen] == ["alpha", "beta", "sharing"]
    assert [one.cache_salt for one in seen] == [b"\xffalpha\xffs", b"\xffbeta\xffs", b"s"]
    # Of a grammar as well, for the worker's threads.
    request.sampling_params.structured_output.regex = "[a-z]+"
    call = guarded.inference.Generate(request, metadata=keys.metadata(keys.beta))
    submission = await guarded.scheduler.serve_one(guarded.encode("fox"))
    await call
    params = logits_pb2.LogitsParams.FromString(submission.params.logits_params)
    assert params.grammar.principal == "beta"
    policy = seen[0].tenant
    assert (policy.weight, policy.requests_per_minute, policy.resumable_requests) == (2.5, 60, 0)
    assert not policy.HasField("tokens_per_minute")
    # The value of the range that is nearest to 0, and the tenant's limit.
    assert (seen[0].priority, seen[0].params.max_tokens) == (1, 12)
    assert not seen[1].HasField("priority")


@pytest.mark.parametrize(
    ("fields", "field", "allowed"),
    [
        ({"priority": 0}, "priority", "1 to 3"),
        ({"resume_window_s": 31}, "resume_window_s", "0 to 30"),
        ({"sampling_params": {"max_tokens": 13}}, "sampling_params.max_tokens", "12 output tokens"),
        (
            {"sampling_params": {"max_tokens": 5, "n": 3}},
            "sampling_params.max_tokens",
            "12 output tokens",
        ),
        ({"sampling_params": {"n": 13}}, "sampling_params.max_tokens", "12 output tokens"),
    ],
)
async def test_requests_beyond_a_tenants_limits_are_refused(
    guarded: Stack, keys: Keys, fields: dict[str, object], field: str, allowed: str
) -> None:
    request = pb.GenerateRequest(text="The", **fields)
    call = guarded.inference.Generate(request, metadata=keys.metadata(keys.alpha))
    code, _, message = await refusal(call)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert message.startswith(f"{field}: ")
    assert allowed in message


async def test_a_beam_search_beyond_a_tenants_limit_names_its_own_fields(
    guarded: Stack, keys: Keys
) -> None:
    request = BeamSearchRequest(text="The", params={"beam_width": 3, "max_tokens": 5})
    call = guarded.beam_search.BeamSearch(request, metadata=keys.metadata(keys.alpha))
    code, _, message = await refusal(call)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert message.startswith("params.max_tokens: is 5 for each of 3 choices;")


async def test_resume_and_cancel_concern_the_tenants_own_requests(
    guarded: Stack, keys: Keys
) -> None:
    metadata = keys.metadata(keys.beta)
    stream = guarded.inference.ResumeGenerate(
        pb.ResumeGenerateRequest(request_id="theirs"), metadata=metadata
    )
    waiting = asyncio.create_task(anext(aiter(stream)))
    attachment = await guarded.scheduler.attachments.get()
    assert (attachment.principal, attachment.request_id) == ("beta", "theirs")
    guarded.scheduler.fail(attachment, grpc.StatusCode.NOT_FOUND)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await waiting
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    cancel = guarded.inference.CancelGenerate(
        pb.CancelGenerateRequest(request_id="theirs"), metadata=metadata
    )
    cancelling = asyncio.ensure_future(cancel)
    cancellation = await guarded.scheduler.cancellations.get()
    assert cancellation.request.principal == "beta"
    guarded.scheduler.send(cancellation_results=[{"tag": cancellation.tag, "found": False}])
    with pytest.raises(grpc.aio.AioRpcError, match="no request 'theirs' is live"):
        await cancelling


async def test_a_removed_key_is_refused(guarded: Stack, keys: Keys) -> None:
    metadata = keys.metadata(keys.alpha)
    request = model_pb2.ListModelsRequest()
    await guarded.models.ListModels(request, metadata=metadata)
    keys.path.write_text("[]")
    header = header_value(keys.alpha)
    await until(lambda: not is_known(guarded, header), "the new file")
    _, reason, _ = await refusal(guarded.models.ListModels(request, metadata=metadata))
    assert reason == "UNKNOWN_KEY"


def is_known(stack: Stack, header: str) -> bool:
    try:
        stack.gateway.authentication.authenticate(header)
    except RequestError:
        return False
    return True


async def test_clients_send_their_key(guarded: Stack, keys: Keys) -> None:
    def list_models(key: str | None) -> int:
        with Client(guarded.address, api_key=key, resume_timeout_s=0) as client:
            return len(client.list_models())

    assert await asyncio.to_thread(list_models, keys.beta) == 1
    with pytest.raises(QuireError) as refused:
        await asyncio.to_thread(list_models, None)
    assert (refused.value.reason, refused.value.resumable) == ("MISSING_KEY", False)
    async with AsyncClient(guarded.address, api_key=keys.beta) as client:
        call = asyncio.create_task(client.generate("The"))
        assert (await guarded.scheduler.serve_one(guarded.encode("fox"))).principal == "beta"
        assert (await call).outputs[0].text == "fox"
        stream = client.stream_generate("The")
        first = asyncio.create_task(anext(stream))
        submission = await guarded.scheduler.serve_one(guarded.encode("fox"))
        assert submission.principal == "beta"
        await first
        await stream.aclose()
    for wrong in ("two words", "über", ""):
        with pytest.raises(ValueError, match="api_key") as invalid:
            Client(guarded.address, api_key=wrong)
        assert not wrong or wrong not in str(invalid.value)


async def test_keys_are_not_logged(guarded: Stack, keys: Keys) -> None:
    with capture_logs() as logs:
        for key in (keys.beta, "quire-wrong"):
            metadata = keys.metadata(key)
            call = guarded.inference.Generate(pb.GenerateRequest(text="The"), metadata=metadata)
            if key == keys.beta:
                await guarded.scheduler.serve_one(guarded.encode("fox"))
            await asyncio.gather(call, return_exceptions=True)
    assert logs
    assert not any(secret in str(logs) for secret in (keys.beta, "quire-wrong"))


@pytest.mark.parametrize(
    ("setting", "listen", "has_keys", "warns"),
    [
        ("listen", "0.0.0.0:0", False, True),
        ("http_listen", "0.0.0.0:0", False, True),
        ("listen", "0.0.0.0:0", True, False),
        ("listen", "127.0.0.1:0", False, False),
    ],
)
async def test_an_open_gateway_that_others_can_reach_logs_a_warning(
    settings_for: SettingsFor, keys: Keys, setting: str, listen: str, has_keys: bool, warns: bool
) -> None:
    gateway = Gateway(settings_for(**{setting: listen}, api_keys=keys.path if has_keys else None))
    with capture_logs() as logs:
        await gateway.start()
    if gateway.http is not None and socket.has_dualstack_ipv6():
        # As of gRPC, 0.0.0.0 stands for the addresses of both families.
        for host in ("127.0.0.1", "::1"):
            _, writer = await asyncio.open_connection(host, gateway.http.address.split(":")[1])
            writer.close()
    await gateway.stop()
    assert any("no API key" in one["event"] for one in logs) is warns


def test_an_invalid_file_ends_the_start(tmp_path: Path, model_folder: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("- {name: a, colour: red}")
    command = [sys.executable, "-m", "gateway_svc", f"--model={model_folder}", f"--api-keys={path}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "[0].colour: no such field" in ended.stdout + ended.stderr


async def test_a_message_is_not_read_without_a_key(guarded: Stack) -> None:
    """A client that never finishes its message is refused."""

    async def nothing() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    call = guarded.channel.stream_stream("/quire.v1.InferenceService/StreamGenerate")(nothing())
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async with asyncio.timeout(5):
            await anext(aiter(call))
    assert info_of(refused.value).reason == "MISSING_KEY"


async def test_http_needs_the_same_keys(guarded: Stack, keys: Keys) -> None:
    assert guarded.gateway.http is not None
    body = {"model": "tiny", "prompt": "The", "max_tokens": 3}
    base_url = f"http://{guarded.gateway.http.address}"
    async with httpx2.AsyncClient(base_url=base_url) as client:
        for headers, code in (
            ({}, "missing_key"),
            ({"authorization": "Bearer quire-wrong"}, "invalid_api_key"),
        ):
            refused = await client.post("/v1/completions", json=body, headers=headers)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == code
            assert (await client.get("/v1/models", headers=headers)).status_code == 401
        headers = {"authorization": f"Bearer {keys.alpha}"}
        call = asyncio.create_task(client.post("/v1/completions", json=body, headers=headers))
        submission = await guarded.scheduler.serve_one(guarded.encode("fox"))
        assert (await call).status_code == 200
        assert (submission.principal, submission.priority) == ("alpha", 1)
        assert submission.tenant.requests_per_minute == 60
        beyond = await client.post(
            "/v1/completions", json={**body, "max_tokens": 13}, headers=headers
        )
        assert beyond.status_code == 400
        assert beyond.json()["error"]["param"] == "max_tokens"
        # The default is lowered to the tenant's 12 output tokens.
        del body["max_tokens"]
        call = asyncio.create_task(client.post("/v1/completions", json=body, headers=headers))
        submission = await guarded.scheduler.serve_one(guarded.encode("fox"))
        assert (await call).status_code == 200
        assert submission.params.max_tokens == 12
        beyond = await client.post("/v1/completions", json={**body, "n": 13}, headers=headers)
        assert beyond.status_code == 400
        assert (await client.get("/health")).status_code == 200
        for path in ("/metrics", "/status"):
            assert (await client.get(path)).status_code == 401
            assert (await client.get(path, headers=headers)).status_code == 403


async def test_all_routes_of_http_need_a_key_and_are_documented(guarded: Stack) -> None:
    """Also those that are added later."""
    assert guarded.gateway.http is not None
    page = (ROOT / "docs/http.md").read_text(encoding="utf-8")
    described = {re.sub(r"{\w+}", "x", route) for route in re.findall(r"`([A-Z]+ /[^`]*)`", page)}
    base_url = f"http://{guarded.gateway.http.address}"
    async with httpx2.AsyncClient(base_url=base_url) as client:
        paths = (await client.get("/openapi.json")).json()["paths"]
        routes = [(method.upper(), path) for path in paths for method in paths[path]]
        assert len(routes) > 10
        for method, template in routes:
            path = re.sub(r"{\w+}", "x", template)
            is_open = path in ("/health", "/ready", "/version")
            response = await client.request(method, path)
            assert (response.status_code == 401) is not is_open, f"{method} {template}"
            assert f"{method} {path}" in described


async def test_a_tenant_holds_at_most_half_of_the_request_bytes(
    guarded: Stack, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert guarded.gateway.http is not None
    monkeypatch.setattr(guarded.gateway.live_limits, "_max_bytes", 4000)
    of_beta = keys.metadata(keys.beta)
    stream = guarded.inference.StreamGenerate(
        pb.StreamGenerateRequest(text="The", cache_salt="s" * 200), metadata=of_beta
    )
    submission = await guarded.scheduler.submissions.get()
    request = tokenizer_pb2.TokenizeRequest(text=" " * 1900)
    code, reason, message = await refusal(guarded.tokenizer.Tokenize(request, metadata=of_beta))
    assert (code, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_TENANT_BYTES")
    assert "2000" in message
    url = f"http://{guarded.gateway.http.address}/tokenize"
    async with httpx2.AsyncClient() as client:
        statuses = []
        for key in (keys.beta, keys.sharing):
            headers = {"authorization": f"Bearer {key}"}
            body = {"prompt": " " * 1900}
            statuses.append((await client.post(url, json=body, headers=headers)).status_code)
    assert statuses[0] == 429
    assert statuses[1] != 429
    guarded.scheduler.accept(submission)
    guarded.scheduler.end(submission, 0)
    assert [part async for part in stream]
    assert not guarded.gateway.live_limits.num_bytes_of


async def test_a_background_response_runs_for_at_most_the_tenants_window(
    guarded: Stack, keys: Keys
) -> None:
    """alpha may use 30 s, sharing any; both are independent of --max-resume-window-s."""
    assert guarded.gateway.http is not None
    url = f"http://{guarded.gateway.http.address}/v1/responses"
    body = {"input": "x", "background": True}
    async with httpx2.AsyncClient() as client:
        windows = []
        for key in (keys.alpha, keys.sharing):
            headers = {"authorization": f"Bearer {key}"}
            sending = asyncio.create_task(client.post(url, json=body, headers=headers))
            submission = await guarded.scheduler.submissions.get()
            windows.append(submission.resume_window_s)
            guarded.scheduler.accept(submission)
            assert (await sending).json()["status"] == "queued"
        assert windows == [30, 3600]


def test_a_tenant_without_a_window_has_no_background() -> None:
    without = Tenant("a", limits=TenantLimits(resume_window_s=0))
    for setting_s, tenant in ((10, without), (0, Tenant("b"))):
        with pytest.raises(RequestError, match="background: is true"):
            background_window_s(setting_s, tenant)
