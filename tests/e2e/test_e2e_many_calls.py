"""Many calls at once on one gateway."""

import asyncio
from collections.abc import Iterator

import pytest

from quire import LLM, AsyncClient, SamplingParams
from quire.launcher.stack import LocalStack

NUM_PROMPTS = 12_000
NUM_STREAMS = 5_000
PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)
SETTINGS = {
    "QUIRE_WORKER_ENGINE": "sim",
    "QUIRE_WORKER_SIM_STEP_MS": "1",
    "QUIRE_WORKER_MAX_NUM_SEQS": "256",
    "QUIRE_WORKER_NUM_BLOCKS": "4097",
}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with LocalStack("demo/model", settings=SETTINGS) as stack:
        yield stack.address


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_twelve_thousand_prompts_in_one_call(address: str) -> None:
    with LLM(target=address) as llm:
        outputs = llm.generate(["Return"] * NUM_PROMPTS, PARAMS)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [4] * NUM_PROMPTS


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_five_thousand_streams_of_one_gateway(address: str) -> None:
    began = 0
    all_began = asyncio.Event()

    async def stream(client: AsyncClient) -> int:
        """Read nothing further until all streams have begun."""
        nonlocal began
        num_tokens = 0
        async for delta in client.stream_generate("Return", PARAMS):
            if not delta.outputs:
                began += 1
                if began == NUM_STREAMS:
                    all_began.set()
                await all_began.wait()
            num_tokens += sum(len(output.token_ids) for output in delta.outputs)
        return num_tokens

    async with AsyncClient(address) as client, asyncio.TaskGroup() as group:
        streams = [group.create_task(stream(client)) for _ in range(NUM_STREAMS)]
    assert [task.result() for task in streams] == [4] * NUM_STREAMS
