"""Many calls at once: all are served, or refused with a time to retry."""

import asyncio
from collections import Counter
from collections.abc import Callable

import grpc
import pytest
from gateway_stack import Stack, info_of
from google.protobuf import json_format, struct_pb2
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from http_client import Http
from waiting import until

from gateway_svc.admission import wire_format
from gateway_svc.admission.request_size import RequestSize
from gateway_svc.server import Gateway
from gateway_svc.settings import GatewaySettings
from quire.service.channels import channel_options
from quire.service.errors import RequestError
from quire.v1 import inference_pb2 as pb
from quire.v1 import inference_pb2_grpc, model_pb2, tokenizer_pb2
from quire.v1.conversation_pb2 import Conversation, Message


def length_field(number: int, content: bytes) -> bytes:
    """A serialized field that has a length."""
    size, length = len(content), bytearray()
    while size > 127:
        length.append(size & 127 | 128)
        size >>= 7
    return bytes([number << 3 | 2, *length, size]) + content


async def test_thousands_of_simultaneous_calls_are_served(stack: Stack) -> None:
    calls = [stack.models.ListModels(model_pb2.ListModelsRequest()) for _ in range(2500)]
    codes = Counter([await call.code() for call in calls])
    assert codes == {grpc.StatusCode.OK: 2500}


def retry_delay_s(error: grpc.aio.AioRpcError) -> float:
    retry = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(retry) for detail in rpc_status.from_call(error).details)
    return float(retry.retry_delay.ToMilliseconds() / 1000)


async def test_calls_beyond_the_limit_are_refused_with_a_time_to_retry(stack: Stack) -> None:
    stack.gateway.live_limits._max_calls = 1
    stream = stack.inference.StreamGenerate(pb.StreamGenerateRequest(text="x"))
    submission = await stack.scheduler.submissions.get()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.models.ListModels(model_pb2.ListModelsRequest())
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    info = info_of(caught.value)
    assert (info.reason, info.metadata["resumable"]) == ("TOO_MANY_CALLS", "true")
    assert retry_delay_s(caught.value) > 0
    stack.scheduler.accept(submission)
    stack.scheduler.end(submission, 0)
    assert [part async for part in stream]
    await stack.models.ListModels(model_pb2.ListModelsRequest())


async def test_request_bytes_beyond_the_budget_are_refused(stack: Stack) -> None:
    stack.gateway.live_limits._max_bytes = 100
    stream = stack.inference.StreamGenerate(pb.StreamGenerateRequest(text="x" * 60))
    submission = await stack.scheduler.submissions.get()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.tokenizer.Tokenize(tokenizer_pb2.TokenizeRequest(text="x" * 60))
    assert info_of(caught.value).reason == "TOO_MANY_REQUEST_BYTES"
    assert retry_delay_s(caught.value) > 0
    stack.scheduler.accept(submission)
    stack.scheduler.end(submission, 0)
    assert [part async for part in stream]
    await stack.tokenizer.Tokenize(tokenizer_pb2.TokenizeRequest(text="x" * 60))


async def test_announced_bytes_of_a_body_hold_nothing(stack: Stack, http: Http) -> None:
    stack.gateway.live_limits._max_bytes = 2000
    connections = [await post(http, b"Content-Length: 1000") for _ in range(5)]
    status = (await http.client.post("/tokenize", json={"prompt": "x"})).status_code
    assert status == 200
    for _, writer in connections:
        writer.close()


async def test_bytes_of_a_body_count_as_they_arrive(stack: Stack, http: Http) -> None:
    stack.gateway.live_limits._max_bytes = 2000
    chunk = b"5dc\r\n" + b" " * 1500 + b"\r\n"
    _, writer = await post(http, b"Transfer-Encoding: chunked", chunk)
    await until(lambda: stack.gateway.live_limits.num_bytes == 1500, "the first body")
    reader, other = await post(http, b"Transfer-Encoding: chunked", chunk)
    assert (await reader.readline()).startswith(b"HTTP/1.1 429")
    for one in (writer, other):
        one.close()
    await until(lambda: stack.gateway.live_limits.num_bytes == 0, "the end of both")


async def test_a_body_that_does_not_arrive_ends_its_request(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway_svc.http.live_requests._BODY_TIMEOUT_S", 0.05)
    reader, writer = await post(http, b"Content-Length: 1000", b"{")
    assert (await reader.readline()).startswith(b"HTTP/1.1 408")
    writer.close()


async def post(
    http: Http, header: bytes, body: bytes = b""
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request to the tokenizer with a part of its body."""
    url = http.client.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(b"POST /tokenize HTTP/1.1\r\nHost: quire\r\n" + header + b"\r\n\r\n" + body)
    await writer.drain()
    return reader, writer


# Two million entries of one or two bytes each, which a parser would expand up to thirtyfold.
_MANY = 2**21
MANY_ENTRIES = {
    "messages": (5, b"\x0a\x00" * _MANY, "conversation.messages", "TOO_MANY_FIELDS"),
    "stop strings": (6, b"\x32\x00" * _MANY, "sampling_params.stop", "TOO_MANY_FIELDS"),
    "stop ids": (6, b"\x38\x00" * _MANY, "sampling_params.stop_token_ids", "TOO_MANY_FIELDS"),
    "ids": (4, length_field(1, b"\x00" * _MANY), "token_ids.ids", "TOO_MANY_NUMBERS"),
    "a group": (5, b"\x7b\x7c" + b"\x0a\x00" * _MANY, "request", "MALFORMED_REQUEST"),
    "too long": (5, b"\x0a\x00" * 2 * _MANY, "conversation", "REQUEST_TOO_LARGE"),
}


@pytest.mark.parametrize("name", MANY_ENTRIES)
async def test_many_entries_are_refused_before_they_are_parsed(stack: Stack, name: str) -> None:
    number, content, field, reason = MANY_ENTRIES[name]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.channel.unary_unary("/quire.v1.InferenceService/Generate")(
            length_field(number, content)
        )
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert str(caught.value.details()).startswith(f"{field}: ")
    assert info_of(caught.value).reason == reason


async def test_large_requests_may_have_nested_variables(stack: Stack) -> None:
    """A level of an object is three of the message."""
    variables = json_format.ParseDict({"a": {"b": [{"c": {"d": 1}}]}}, struct_pb2.Struct())
    messages = [Message(role="user", content=" " * 2**17)]
    request = pb.GenerateRequest(
        conversation=Conversation(messages=messages, chat_template_kwargs=variables)
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.inference.Generate(request)
    assert info_of(caught.value).reason == "PROMPT_TOO_LONG"


def test_a_request_that_is_too_large_is_refused_without_counting_its_entries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its neighbours wait meanwhile."""
    varints = 0

    def counted(data: bytes, at: int) -> tuple[int, int]:
        nonlocal varints
        varints += 1
        return varint(data, at)

    varint = wire_format._varint
    monkeypatch.setattr(wire_format, "_varint", counted)
    data = length_field(1, b"id") + length_field(5, b"\x0a\x00" * 10**5) + b"\x38\x01"
    with pytest.raises(RequestError, match="conversation: makes a request of"):
        RequestSize(10**5, 10).check(data, pb.GenerateRequest.DESCRIPTOR)
    assert varints < 10
    for malformed in (b"\xff" * 20_000, b"\x7b" * 20_000, b"\x1a\xff" + b"\xff" * 20_000):
        with pytest.raises(RequestError, match="request: makes a request of"):
            RequestSize(10**4, 10).check(malformed, pb.GenerateRequest.DESCRIPTOR)


async def test_calls_that_send_no_request_are_limited(
    settings_for: Callable[..., GatewaySettings],
) -> None:
    gateway = Gateway(settings_for(max_live_calls=2))
    address = await gateway.start()
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        method = channel.stream_unary("/quire.v1.ModelService/ListModels")
        silent = [method() for _ in range(3)]
        done, _ = await asyncio.wait(
            [asyncio.create_task(call.code()) for call in silent],
            return_when=asyncio.FIRST_COMPLETED,
        )
        assert {task.result() for task in done} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        # Other requests are served.
        tokenizer = channel.unary_unary("/quire.v1.TokenizerService/Tokenize")
        await tokenizer(tokenizer_pb2.TokenizeRequest(text="x").SerializeToString())
        for call in silent:
            call.cancel()
    await gateway.stop()


async def test_a_stopping_gateway_accepts_calls_and_refuses_them(
    settings_for: Callable[..., GatewaySettings],
) -> None:
    """With a call at the socket that the server has not accepted yet."""
    gateway = Gateway(settings_for(drain_grace_s=30.0))
    address = await gateway.start()
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        await channel.channel_ready()
        calls = [
            inference_pb2_grpc.InferenceServiceStub(channel).Generate(pb.GenerateRequest(text="x"))
            for _ in range(20)
        ]
        await gateway.drain()
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    await gateway.stop()
