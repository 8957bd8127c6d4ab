"""A stack with one row: waiting requests are served by priority, and their number is limited."""

import asyncio
from collections.abc import AsyncGenerator, Iterator

import pytest
from tiny_models import FAMILIES, VOCAB_SIZE, save_model
from tiny_tokenizer import save_tokenizer

from quire.client.async_client import AsyncClient
from quire.client.errors import QuireError
from quire.client.outputs import RequestDelta
from quire.client.sampling_params import SamplingParams
from quire.launcher.stack import LocalStack

SETTINGS = {
    "QUIRE_WORKER_ENGINE": "sim",
    "QUIRE_WORKER_SIM_STEP_MS": "2",
    "QUIRE_WORKER_MAX_NUM_SEQS": "1",
    "QUIRE_SCHEDULER_SCHEDULING_POLICY": "priority",
    "QUIRE_SCHEDULER_MAX_WAITING_REQUESTS": "2",
}
SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
# Runs until it is left.
ENDLESS = SamplingParams(temperature=0, ignore_eos=True)

Stream = AsyncGenerator[RequestDelta, None]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    config = FAMILIES["llama"]()
    config.max_position_embeddings = 8192
    folder = save_model(config, tmp_path_factory.mktemp("served"))
    save_tokenizer(folder, VOCAB_SIZE)
    with LocalStack(str(folder), settings=SETTINGS) as stack:
        yield stack.address


async def accepted(stream: Stream) -> Stream:
    assert not (await anext(stream)).outputs
    return stream


async def test_a_smaller_priority_is_served_earlier_and_a_full_queue_refuses(address: str) -> None:
    ended: list[str] = []

    async def finish(name: str, stream: Stream) -> None:
        async for _ in stream:
            pass
        ended.append(name)

    async with AsyncClient(address) as client:
        running = await accepted(client.stream_generate("t1 t2", ENDLESS, priority=9))
        assert (await anext(running)).outputs
        late = await accepted(client.stream_generate("t3", SHORT))
        early = await accepted(client.stream_generate("t4", SHORT, priority=-1))
        with pytest.raises(QuireError) as caught:
            await client.generate("t5", SHORT, priority=-2)
        assert (caught.value.code.name, caught.value.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
        assert caught.value.retry_after_s is not None
        waiting = asyncio.gather(finish("late", late), finish("early", early))
        await running.aclose()
        await waiting
        assert ended == ["early", "late"]
        assert len((await client.generate("t5", SHORT)).outputs[0].token_ids) == 4
