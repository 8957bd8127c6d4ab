"""Connections of a certain age are closed, and no call fails by it."""

import asyncio
from collections.abc import Callable
from functools import partial

import grpc
import pytest
from gateway_stack import Stack
from http_client import Http

from gateway_svc.settings import GatewaySettings
from quire.v1 import inference_pb2 as pb
from quire.v1 import model_pb2

AGE_S = 0.2
NUM_CONNECTIONS = 3
TEXT = "The quick brown fox jumps over the lazy dog"


@pytest.fixture
def age_s(request: pytest.FixtureRequest) -> float:
    return float(getattr(request, "param", AGE_S))


@pytest.fixture
def settings_for(
    settings_for: Callable[..., GatewaySettings], age_s: float
) -> Callable[..., GatewaySettings]:
    return partial(settings_for, max_connection_age_s=age_s)


async def wait_for_close(channel: grpc.aio.Channel) -> None:
    """Return when the channel's connection takes no more calls."""
    while (state := channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
        await channel.wait_for_state_change(state)
    await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)


async def test_a_stream_outlives_its_connection(stack: Stack) -> None:
    ids = stack.encode(TEXT)
    call = stack.inference.StreamGenerate(pb.StreamGenerateRequest(text="A story", request_id="r"))
    submission = await stack.scheduler.submissions.get()
    stack.scheduler.accept(submission)
    stream = aiter(call)
    await anext(stream)
    received = []
    for index in range(NUM_CONNECTIONS):
        stack.scheduler.write(submission, index, [ids[index]])
        received.append(await anext(stream))
        await wait_for_close(stack.channel)
        # On another connection.
        await stack.check_next_request()
    stack.scheduler.write(submission, NUM_CONNECTIONS, ids[NUM_CONNECTIONS:])
    stack.scheduler.end(submission, len(ids))
    received += [response async for response in stream]
    parts = [part for response in received for part in response.deltas]
    assert [id_ for part in parts for id_ in part.token_ids] == ids
    assert "".join(part.text for part in parts) == TEXT


async def test_calls_one_after_another_do_not_fail(stack: Stack) -> None:
    closed = asyncio.create_task(wait_for_close(stack.channel))
    while not closed.done():
        await stack.models.ListModels(model_pb2.ListModelsRequest())
    await stack.models.ListModels(model_pb2.ListModelsRequest())


async def test_http_closes_with_a_response(http: Http) -> None:
    num_closed = 0
    with_stream = {"model": "tiny", "prompt": "A story", "stream": True}
    async with http.stream("/v1/completions", with_stream) as events:
        submission = await http.submission()
        http.stack.scheduler.accept(submission)
        ids = http.stack.encode(TEXT)
        http.stack.scheduler.write(submission, 0, ids[:2])
        texts = [(await events.next()).json()["choices"][0]["text"]]
        async with asyncio.timeout(60):
            while num_closed < NUM_CONNECTIONS:
                response = await http.client.get("/v1/models")
                assert response.status_code == 200
                num_closed += response.headers.get("connection") == "close"
        http.stack.scheduler.write(submission, 2, ids[2:])
        http.stack.scheduler.end(submission, len(ids))
        *rest, done = await events.rest()
        texts += [choice["text"] for event in rest for choice in event.json()["choices"]]
    assert done.data == "[DONE]"
    assert "".join(texts) == TEXT


@pytest.mark.parametrize("age_s", [3600], indirect=True)
async def test_a_young_connection_serves_many_requests(http: Http) -> None:
    for _ in range(NUM_CONNECTIONS):
        response = await http.client.get("/v1/models")
        assert "connection" not in response.headers
