"""Streams of a gateway that is stopped for longer than their clients wait for it."""

import asyncio

import pytest
from waiting import until

from quire.client.async_client import AsyncClient
from quire.client.errors import QuireError
from quire.client.sampling_params import SamplingParams
from quire.launcher.stack import LocalStack

SETTINGS = {"QUIRE_WORKER_ENGINE": "sim", "QUIRE_WORKER_SIM_STEP_MS": "15"}
NUM_STREAMS = 4
PARAMS = SamplingParams(max_tokens=600, ignore_eos=True)


@pytest.mark.slow
async def test_clients_resume_at_the_same_gateway() -> None:
    breaks: list[QuireError] = []
    received: list[list[int]] = [[] for _ in range(NUM_STREAMS)]

    async def follow(client: AsyncClient, index: int) -> None:
        stream = client.stream_generate([1, 2, index], PARAMS, request_id=f"stopped-{index}")
        async for delta in stream:
            for output in delta.outputs:
                received[index] += output.token_ids

    with LocalStack("demo/model", settings=SETTINGS) as stack:
        [gateway] = stack.processes("gateway")
        async with (
            AsyncClient(stack.address) as client,
            AsyncClient(stack.address, on_break=breaks.append) as streaming,
        ):
            streams = [asyncio.create_task(follow(streaming, i)) for i in range(NUM_STREAMS)]
            await until(lambda: all(received), "the first tokens")
            gateway.pause()
            await until(lambda: len(breaks) >= NUM_STREAMS, "the clients' notice")
            assert not any(len(tokens) == PARAMS.max_tokens for tokens in received)
            gateway.resume()
            await asyncio.gather(*streams)
            # What was recorded, from the start.
            for index, tokens in enumerate(received):
                whole = await client.generate([1, 2, index], PARAMS, request_id=f"stopped-{index}")
                assert tokens == whole.outputs[0].token_ids
                assert len(tokens) == PARAMS.max_tokens
