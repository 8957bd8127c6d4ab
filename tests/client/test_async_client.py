import asyncio
import time
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio
from scripted_server import MAX_CALLS, ScriptedServer
from waiting import until

from quire import AsyncClient, InvalidArgumentError, QuireError, SamplingParams, Usage
from quire.client import concurrent_calls


@pytest_asyncio.fixture
async def async_client(server: ScriptedServer) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(server.target) as client:
        yield client


async def test_calls_run_at_the_same_time(async_client):
    prompt = f"barrier {MAX_CALLS}"
    outputs = await asyncio.gather(*(async_client.generate(prompt) for _ in range(MAX_CALLS)))
    assert {output.outputs[0].text for output in outputs} == {prompt.upper()}


async def test_a_stream_has_text_and_usage(async_client):
    deltas = [delta async for delta in async_client.stream_generate("one two")]
    assert "".join(delta.text for delta in deltas) == "ONETWO"
    assert deltas[-1].usage == Usage(3, 1, 2)


async def test_the_deltas_of_a_stream_have_their_index(async_client):
    params = SamplingParams(n=2)
    texts = ["", ""]
    async for delta in async_client.stream_generate("one two", params, priority=1):
        for output in delta.outputs:
            texts[output.index] += output.text
    assert texts == ["ONETWO", "ONEONETWOTWO"]


async def test_streamed_and_unary_outputs_have_logprobs(async_client):
    params = SamplingParams(logprobs=1)
    deltas = [d async for d in async_client.stream_generate("one two", params)]
    logprobs = [one for d in deltas for output in d.outputs for one in output.logprobs]
    assert [list(one) for one in logprobs] == [[0], [1, 0]]
    output = await async_client.generate("one", params)
    assert [list(one) for one in output.outputs[0].logprobs] == [[1, 0], [2, 0]]


async def test_closing_a_stream_cancels_the_call(async_client, server):
    stream = async_client.stream_generate("hang")
    await anext(stream)
    assert await asyncio.to_thread(server.inference.hanging.wait, 10)
    await stream.aclose()
    assert await asyncio.to_thread(server.inference.released.wait, 10)


async def test_cancelling_the_task_cancels_the_call(async_client, server):
    task = asyncio.create_task(async_client.generate("hang"))
    assert await asyncio.to_thread(server.inference.hanging.wait, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(server.inference.released.wait, 10)


async def test_errors_carry_their_details(async_client):
    with pytest.raises(QuireError) as caught:
        await async_client.generate("bad")
    assert caught.value.field == "sampling_params.temperature"
    with pytest.raises(QuireError) as caught:
        async for _ in async_client.stream_generate("hang", timeout_s=0.2):
            pass
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_cancel_tokenize_detokenize_and_models(async_client, server):
    await async_client.cancel("r7")
    assert server.inference.cancelled_ids == ["r7"]
    assert await async_client.tokenize("ab") == [0, 97, 98]
    assert await async_client.detokenize([97, 98]) == "ab"
    assert [model.name for model in await async_client.list_models()] == ["scripted"]


def test_a_client_can_be_created_without_a_running_loop(server):
    client = AsyncClient(server.target)

    async def ask() -> str:
        async with client:
            return (await client.generate("hello")).outputs[0].text

    assert asyncio.run(ask()) == "HELLO"


def test_a_client_of_another_loop_refuses_calls(server):
    client = AsyncClient(server.target)

    async def ask() -> str:
        return (await client.generate("hello")).text

    async def ask_and_ask_elsewhere() -> str:
        text = await ask()
        with pytest.raises(RuntimeError, match="the client belongs to another event loop"):
            await asyncio.to_thread(asyncio.run, ask())
        await client.close()
        return text

    assert asyncio.run(ask_and_ask_elsewhere()) == "HELLO"


async def test_a_closed_client_refuses_calls(async_client):
    await async_client.close()
    with pytest.raises(ValueError, match="the client is closed"):
        await async_client.generate("hello")
    with pytest.raises(ValueError, match="the client is closed"):
        await anext(async_client.stream_generate("hello"))


async def test_closing_a_client_ends_its_calls_with_an_error(async_client, server):
    """Not as if their tasks had been cancelled."""
    stream = async_client.stream_generate("hang")
    await anext(stream)
    calls = [
        asyncio.create_task(anext(stream)),
        asyncio.create_task(async_client.generate("hang")),
        asyncio.create_task(async_client.generate_all(["hang"], [None])),
    ]
    await until(lambda: len(server.inference.requests) == 3, "the calls")
    await async_client.close()
    for ended in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(ended, QuireError)
        assert str(ended) == "CANCELLED: the client is closed"
    assert not any(call.cancelled() for call in calls)


async def test_closing_a_client_ends_calls_between_two_attempts(tmp_path):
    failures = []
    client = AsyncClient(f"unix:{tmp_path}/none.sock", on_break=failures.append)
    calls = [
        asyncio.create_task(client.generate("hello")),
        asyncio.create_task(anext(client.stream_generate("hello"))),
    ]
    await until(lambda: len(failures) >= len(calls), "the first attempts")
    await client.close()
    for ended in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(ended, QuireError)
        assert str(ended) == "CANCELLED: the client is closed"


async def test_invalid_arguments_are_refused_at_once(async_client, server):
    with pytest.raises(TypeError, match="prompt: must be"):
        async_client.stream_generate(5)
    with pytest.raises(ValueError, match="timeout_s: must be"):
        await async_client.generate("hello", timeout_s=float("nan"))
    assert server.inference.requests == []


async def test_all_prompts_run_at_the_same_time_and_keep_their_order(async_client):
    prompts = [f"barrier {MAX_CALLS}"] * (MAX_CALLS - 1) + [f"barrier  {MAX_CALLS}"]
    ended = []
    outputs = await async_client.generate_all(prompts, [None] * MAX_CALLS, on_end=ended.append)
    assert [output.text for output in outputs] == [prompt.upper() for prompt in prompts]
    assert sorted(map(id, ended)) == sorted(map(id, outputs))


async def test_failures_take_the_places_of_their_outputs(async_client):
    prompts = ["one", "bad", b"wrong"]
    results = await async_client.generate_all(prompts, [None] * 3, return_exceptions=True)
    assert results[0].text == "ONE"
    assert [type(result) for result in results[1:]] == [InvalidArgumentError, TypeError]


async def test_prompts_that_wait_for_others_have_the_same_deadline(
    async_client, server, monkeypatch
):
    monkeypatch.setattr(concurrent_calls, "MAX_CALLS", 1)
    # The second one is sent after this.
    await async_client.generate_all(
        ["one", "two"], [None] * 2, timeout_s=5.0, on_end=lambda _: time.sleep(0.2)
    )
    assert server.inference.seconds_left[1] < 4.9


async def test_the_first_failure_raises_and_cancels_the_others(async_client, server):
    with pytest.raises(InvalidArgumentError):
        await async_client.generate_all(["hang", "bad later"], [None, None])
    assert await asyncio.to_thread(server.inference.released.wait, 10)
