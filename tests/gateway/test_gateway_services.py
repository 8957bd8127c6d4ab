"""The services through a real server, and the gateway as a process."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import httpx2
import pytest
from gateway_fake_scheduler import MAX_MODEL_LEN, FakeScheduler
from gateway_stack import Stack, info_of
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status
from tokenizers import processors
from waiting import until

from gateway_svc.generation import tokenization
from gateway_svc.server import SERVICES, Gateway
from gateway_svc.settings import GatewaySettings
from quire.v1 import inference_pb2 as pb
from quire.v1 import inference_pb2_grpc, model_pb2, tokenizer_pb2
from quire.v1.conversation_pb2 import Conversation, Message


async def test_reflection_lists_every_service(stack: Stack) -> None:
    reflection = reflection_pb2_grpc.ServerReflectionStub(stack.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    async for response in reflection.ServerReflectionInfo(iter([request])):
        names = {service.name for service in response.list_services_response.service}
    assert {*SERVICES, "grpc.health.v1.Health"} <= names
    assert {f"grpc.reflection.{version}.ServerReflection" for version in ("v1", "v1alpha")} <= names
    for name in names:
        # Clients such as `buf curl --list-methods` ask for each of them, and fail without one.
        request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=name)
        async for response in reflection.ServerReflectionInfo(iter([request])):
            files = response.file_descriptor_response.file_descriptor_proto
            assert FileDescriptorProto.FromString(files[0]).package == name.rpartition(".")[0]


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_malformed_reflection_requests_are_invalid_arguments(
    stack: Stack, version: str
) -> None:
    method = f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
    call = stack.channel.stream_stream(method)(iter([b"\x0a\xff"]))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_the_model_is_described(stack: Stack) -> None:
    listed = (await stack.models.ListModels(model_pb2.ListModelsRequest())).models
    got = (await stack.models.GetModel(model_pb2.GetModelRequest(name="tiny"))).model
    assert list(listed) == [got]
    assert (got.name, got.max_model_len, got.has_chat_template) == ("tiny", MAX_MODEL_LEN, True)
    assert got.vocab_size == stack.gateway.served.get(None).files.tokenizer.get_vocab_size()
    assert list(got.eos_token_ids) == stack.encode("</s>")


async def test_tokenize_and_detokenize(stack: Stack) -> None:
    text = "Größe 🙂</s>"
    response = await stack.tokenizer.Tokenize(tokenizer_pb2.TokenizeRequest(text=text))
    assert list(response.token_ids) == stack.encode(text)
    assert not response.HasField("rendered")
    for skip, expected in ((None, "Größe 🙂"), (True, "Größe 🙂"), (False, text)):
        request = tokenizer_pb2.DetokenizeRequest(
            token_ids=response.token_ids, skip_special_tokens=skip
        )
        assert (await stack.tokenizer.Detokenize(request)).text == expected


async def test_a_conversation_is_rendered_and_tokenized(stack: Stack) -> None:
    conversation = Conversation(
        messages=[Message(role="user", content="hi")], add_generation_prompt=False
    )
    request = tokenizer_pb2.TokenizeRequest(conversation=conversation)
    response = await stack.tokenizer.Tokenize(request)
    assert response.rendered == "<s><|user|>hi\n"
    assert list(response.token_ids) == stack.encode(response.rendered)


@pytest.mark.parametrize(
    ("method", "request_", "field"),
    [
        ("Tokenize", tokenizer_pb2.TokenizeRequest(), "text"),
        ("Detokenize", tokenizer_pb2.DetokenizeRequest(token_ids=[1, 10**6]), "token_ids[1]"),
        ("Detokenize", tokenizer_pb2.DetokenizeRequest(token_ids=[1] * (2**17 + 1)), "token_ids"),
    ],
)
async def test_the_tokenizer_names_the_invalid_field(
    stack: Stack, method: str, request_: object, field: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await getattr(stack.tokenizer, method)(request_)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert str(caught.value.details()).startswith(f"{field}: ")


async def test_a_rendered_text_that_is_too_long_is_not_tokenized(stack: Stack) -> None:
    limits = stack.gateway.served.get(None).limits(MAX_MODEL_LEN)
    content = "a" * (limits.max_model_len * limits.longest_token)
    request = tokenizer_pb2.TokenizeRequest(
        conversation=Conversation(messages=[Message(role="user", content=content)])
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.tokenizer.Tokenize(request)
    assert info_of(caught.value).reason == "PROMPT_TOO_LONG"


async def test_the_maximum_number_of_ids_is_detokenized(stack: Stack) -> None:
    [x] = stack.encode("x")
    request = tokenizer_pb2.DetokenizeRequest(token_ids=[x] * 2**17)
    assert (await stack.tokenizer.Detokenize(request)).text == "x" * 2**17


@pytest.mark.parametrize(
    ("method", "request_", "field"),
    [
        ("Tokenize", tokenizer_pb2.TokenizeRequest(text="x" * 100), "text"),
        ("Detokenize", tokenizer_pb2.DetokenizeRequest(token_ids=[50] * 100), "token_ids"),
    ],
)
async def test_a_response_beyond_the_message_limit_is_refused(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, method: str, request_: object, field: str
) -> None:
    monkeypatch.setattr(tokenization, "PUBLIC_MESSAGE_BYTES", 64)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await getattr(stack.tokenizer, method)(request_)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert str(caught.value.details()).startswith(f"{field}: ")


@pytest.mark.parametrize("add_special_tokens", [None, True, False])
async def test_a_conversation_has_only_the_special_tokens_of_its_template(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, add_special_tokens: bool | None
) -> None:
    tokenizer = stack.gateway.served.get(None).files.tokenizer
    bos = tokenizer.token_to_id("<s>")
    monkeypatch.setattr(
        tokenizer,
        "post_processor",
        processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)]),
    )
    conversation = Conversation(messages=[Message(role="user", content="hi")])
    for parts, has_bos in (
        ({"text": "hi"}, add_special_tokens is not False),
        ({"conversation": conversation}, False),
    ):
        request = tokenizer_pb2.TokenizeRequest(**parts, add_special_tokens=add_special_tokens)
        response = await stack.tokenizer.Tokenize(request)
        assert list(response.token_ids) == [bos] * has_bos + stack.encode(response.rendered or "hi")


async def test_an_unexpected_exception_is_an_internal_error(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(name: str | None) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(stack.gateway.served, "get", broken)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.models.ListModels(model_pb2.ListModelsRequest())
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in str(caught.value.details())


async def test_a_gateway_without_its_model_is_alive_but_not_ready(
    settings_for: Callable[..., GatewaySettings], tmp_path: Path
) -> None:
    gateway = Gateway(settings_for(model=str(tmp_path), served_model_name=None))
    address = await gateway.start()
    async with grpc.aio.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == 1
        ready = await health.Check(health_pb2.HealthCheckRequest(service="ready"))
        assert ready.status == health_pb2.HealthCheckResponse.NOT_SERVING
        inference = inference_pb2_grpc.InferenceServiceStub(channel)
        for call in (
            inference.Generate(pb.GenerateRequest(text="x")),
            inference.ResumeGenerate(pb.ResumeGenerateRequest(request_id="x")).read(),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    await gateway.stop()


async def test_draining_waits_for_streams_and_stopping_ends_them(
    settings_for: Callable[..., GatewaySettings],
) -> None:
    scheduler = FakeScheduler()
    port = await scheduler.start()
    gateway = Gateway(settings_for(scheduler=f"127.0.0.1:{port}", drain_grace_s=30.0))
    address = await gateway.start()
    async with grpc.aio.insecure_channel(address) as channel:
        stack = Stack(gateway, scheduler, port, address, channel)
        await asyncio.wait_for(stack.wait_for_status(health_pb2.HealthCheckResponse.SERVING), 10)
        calls = [stack.inference.StreamGenerate(pb.StreamGenerateRequest(text="x")) for _ in "ab"]
        submissions = [await scheduler.submissions.get() for _ in calls]
        for submission in submissions:
            scheduler.accept(submission)
        calls_by_id = {}
        for call in map(aiter, calls):
            calls_by_id[(await anext(call)).request_id] = call
        watch = aiter(stack.health.Watch(health_pb2.HealthCheckRequest(service="ready")))
        assert (await anext(watch)).status == health_pb2.HealthCheckResponse.SERVING
        draining = asyncio.create_task(gateway.drain())
        assert (await anext(watch)).status == health_pb2.HealthCheckResponse.NOT_SERVING

        finishing, unfinished = submissions
        scheduler.write(finishing, 0, stack.encode("fox"))
        scheduler.end(finishing, len(stack.encode("fox")))
        texts = [part async for part in calls_by_id[finishing.request_id]]
        assert texts[-1].HasField("usage")
        assert not draining.done()
        draining.cancel()
        await asyncio.wait([draining])
        stopping = asyncio.create_task(gateway.stop())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(calls_by_id[unfinished.request_id])
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        details = rpc_status.from_call(caught.value).details
        assert any(detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for detail in details)
        await stopping
    await scheduler.stop()


async def test_requests_that_wait_for_a_scheduler_or_a_body_end_when_it_stops(
    settings_for: Callable[..., GatewaySettings],
) -> None:
    may_go_on = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield b'{"prompt": '
        await may_go_on.wait()

    gateway = Gateway(settings_for(scheduler="127.0.0.1:1", http_listen="127.0.0.1:0"))
    address = await gateway.start()
    await until(lambda: gateway.served.is_set, "the model")
    assert gateway.http is not None
    http = httpx2.AsyncClient(base_url=f"http://{gateway.http.address}")
    async with grpc.aio.insecure_channel(address) as channel, http:
        inference = inference_pb2_grpc.InferenceServiceStub(channel)
        call = inference.Generate(pb.GenerateRequest(text="x"))
        path, json_type = "/v1/completions", {"content-type": "application/json"}
        posts = [
            asyncio.create_task(http.post(path, json={"prompt": "x"})),
            asyncio.create_task(http.post(path, json={"prompt": "x", "stream": True})),
            asyncio.create_task(http.post(path, content=body(), headers=json_type)),
        ]
        await until(lambda: gateway.live_limits.num_calls == 4, "the calls")
        await gateway.stop()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert (info_of(caught.value).reason, caught.value.code()) == (
            "STOPPING",
            grpc.StatusCode.UNAVAILABLE,
        )
        may_go_on.set()
        for response in await asyncio.gather(*posts):
            assert (response.status_code, response.headers["retry-after"]) == (503, "1")
            assert response.json()["error"]["code"] == "stopping"


@contextmanager
def gateway_process(address_file: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "gateway_svc", "--listen", "127.0.0.1:0", *flags]
    command += ["--address-file", str(address_file), "--log-format", "json"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def log_until(process: subprocess.Popen[str], event: str) -> list[dict[str, object]]:
    lines = []
    assert process.stderr is not None
    # Skips lines of gRPC's core, which are not JSON.
    for line in (line for line in process.stderr if line.startswith("{")):
        lines.append(json.loads(line))
        if lines[-1]["event"] == event:
            return lines
    raise AssertionError(f"{event} was not logged: {lines}")


def test_the_process_stops_on_a_signal(model_folder: Path, tmp_path: Path) -> None:
    address_file = tmp_path / "address"
    with gateway_process(address_file, "--model", str(model_folder)) as process:
        log_until(process, "model loaded")
        with grpc.insecure_channel(address_file.read_text()) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            response = health.Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert response.status == health_pb2.HealthCheckResponse.SERVING
        process.send_signal(signal.SIGTERM)
        log_until(process, "stopped")
        assert process.wait(10) == 0


def test_a_missing_model_is_one_clear_log_line(tmp_path: Path) -> None:
    missing = str(tmp_path / "nowhere")
    with gateway_process(tmp_path / "address", "--model", missing) as process:
        last = log_until(process, "the model cannot be served")[-1]
        assert missing in str(last["reason"])
        assert "exception" not in last
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


@pytest.mark.parametrize(
    ("flags", "value"),
    [
        (["--tokenizer-threads", "0"], "'0'"),
        pytest.param(["--no-such", "1"], "no-such", marks=pytest.mark.slow),
    ],
)
def test_wrong_settings_stop_the_process(flags: list[str], value: str, tmp_path: Path) -> None:
    with gateway_process(tmp_path / "address", "--model", "x", *flags) as process:
        assert process.stderr is not None
        assert value in process.stderr.read()
        assert process.wait(10) == 2


def test_an_address_in_use_is_reported(stack_address: str, tmp_path: Path) -> None:
    with gateway_process(
        tmp_path / "address", "--model", "x", "--listen", stack_address
    ) as process:
        assert stack_address in str(log_until(process, "cannot start")[-1]["reason"])
        assert process.wait(10) == 1


@pytest.fixture
def stack_address(tmp_path: Path) -> Iterator[str]:
    address_file = tmp_path / "other"
    with gateway_process(address_file, "--model", str(tmp_path / "none")) as process:
        log_until(process, "listening")
        yield address_file.read_text()


@pytest.mark.slow
def test_a_gateway_imports_no_torch(model_folder: Path) -> None:
    program = """
import asyncio, sys
from gateway_svc.server import Gateway
from gateway_svc.settings import GatewaySettings

async def main():
    gateway = Gateway(GatewaySettings(listen="127.0.0.1:0", model=sys.argv[1]))
    await gateway.start()
    while "tokenizer" in gateway.health.failing:
        await asyncio.sleep(0.01)
    await gateway.stop()

asyncio.run(main())
print([name for name in ("torch", "transformers", "redis") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(model_folder)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=os.environ,
    )
    assert done.stdout.splitlines()[-1] == "[]"
