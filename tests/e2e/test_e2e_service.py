"""The whole stack as real processes: bad input, clients that die, and what is left in Redis."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import redis
from pool_watch import PoolWatch
from tiny_models import FAMILIES, MAX_MODEL_LEN, VOCAB_SIZE, save_model
from tiny_tokenizer import save_tokenizer
from waiting import until

from quire import LLM
from quire.client.async_client import AsyncClient
from quire.client.errors import QuireError
from quire.client.sampling_params import SamplingParams
from quire.launcher.redis import EmbeddedRedis
from quire.launcher.stack import LocalStack

SETTINGS = {
    "QUIRE_WORKER_BLOCK_SIZE": "4",
    "QUIRE_WORKER_NUM_BLOCKS": "129",
    "QUIRE_WORKER_THREADS": "1",
    "QUIRE_SCHEDULER_CHECK_EVERY_STEP": "true",
    "QUIRE_SCHEDULER_FINISHED_TTL_S": "30",
}
LONG = SamplingParams(temperature=0, max_tokens=MAX_MODEL_LEN - 8, ignore_eos=True)


@pytest.fixture(scope="module")
def watch(redis_server: EmbeddedRedis) -> Iterator[PoolWatch]:
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
        yield PoolWatch(client)
        client.flushall()


@pytest.fixture(scope="module")
def address(
    tmp_path_factory: pytest.TempPathFactory, redis_server: EmbeddedRedis, watch: PoolWatch
) -> Iterator[str]:
    """Two workers, so that placement has a choice."""
    folder = save_model(FAMILIES["llama"](), tmp_path_factory.mktemp("served"))
    save_tokenizer(folder, VOCAB_SIZE)
    with LocalStack(
        str(folder),
        num_workers=2,
        redis_url=redis_server.url,
        served_model_name="tiny",
        settings=SETTINGS,
    ) as stack:
        yield stack.address
    # The pools outlive the scheduler, because its successor can reuse them. No block is held.
    assert watch.num_pools == 2
    assert watch.num_held == 0


@pytest.fixture(autouse=True)
async def conservation(address: str, watch: PoolWatch) -> None:
    """Check after every test that all blocks are free and no request is live."""
    await until(lambda: watch.num_pools == 2, "both workers")
    yield
    await until(lambda: watch.num_held == 0, "the blocks' return")
    assert watch.is_conserved
    await until(lambda: not watch.live_requests(), "the records' ends")


BAD_INPUT = {
    "an unknown model": ("t1", {}, {"model": "unknown"}, "NOT_FOUND", "model"),
    "an empty prompt": ("", {}, {}, "INVALID_ARGUMENT", "text"),
    "a prompt as long as the model": (
        [1] * MAX_MODEL_LEN,
        {},
        {},
        "INVALID_ARGUMENT",
        "token_ids.ids",
    ),
    "a negative temperature": (
        "t1",
        {"temperature": -1.0},
        {},
        "INVALID_ARGUMENT",
        "sampling_params.temperature",
    ),
    "no tokens to write": (
        "t1",
        {"max_tokens": 0},
        {},
        "INVALID_ARGUMENT",
        "sampling_params.max_tokens",
    ),
    "more choices than allowed": (
        "t1",
        {"n": 17},
        {},
        "INVALID_ARGUMENT",
        "sampling_params.n",
    ),
    "text far too long for the model": ("t1 " * 500_000, {}, {}, "INVALID_ARGUMENT", "text"),
    "20 MB of text": ("t1 " * 6_700_000, {}, {}, "RESOURCE_EXHAUSTED", ""),
    "a token outside the vocabulary": (
        [1, 2, VOCAB_SIZE],
        {},
        {},
        "INVALID_ARGUMENT",
        "token_ids.ids",
    ),
}


@pytest.mark.parametrize("case", BAD_INPUT)
async def test_bad_input_is_refused_by_its_field_and_the_next_request_works(
    address: str, watch: PoolWatch, case: str
) -> None:
    prompt, params, options, code, field = BAD_INPUT[case]
    async with AsyncClient(address) as client:
        with pytest.raises(QuireError) as caught:
            await client.generate(prompt, SamplingParams(**params), **options)
        assert caught.value.code.name == code
        assert (caught.value.field or "").startswith(field)
        output = await client.generate("t1 t2", SamplingParams(max_tokens=3, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 3


async def test_the_blocks_of_a_killed_client_are_free_within_a_second(
    address: str, watch: PoolWatch
) -> None:
    client = subprocess.Popen(  # noqa: ASYNC220  (short, and killed)
        [sys.executable, str(Path(__file__).with_name("streaming_client.py")), address],
        stdout=subprocess.PIPE,
    )
    assert client.stdout is not None
    try:
        await asyncio.to_thread(client.stdout.readline)
        assert watch.num_held > 0
    finally:
        client.send_signal(signal.SIGKILL)
    await until(lambda: watch.num_held == 0, "the blocks' return", timeout_s=1.0)
    client.wait()


async def test_a_disconnect_and_a_deadline_free_the_blocks(address: str, watch: PoolWatch) -> None:
    async with AsyncClient(address) as client:
        stream = client.stream_generate([1, 2, 3, 4, 5, 6, 7], LONG)
        async for delta in stream:
            if delta.outputs:
                break
        await stream.aclose()
        await until(lambda: watch.num_held == 0, "the blocks' return", timeout_s=1.0)
        # Takes several times the deadline.
        slow = replace(LONG, n=8, temperature=1, logprobs=20)
        with pytest.raises(QuireError) as caught:
            async for _ in client.stream_generate([1, 2, 3], slow, timeout_s=0.05):
                pass
        assert caught.value.code.name == "DEADLINE_EXCEEDED"


async def test_a_stop_string_ends_one_choice_of_several(address: str) -> None:
    prompt = "t1 t2 t3 t4 t5"
    params = SamplingParams(n=4, seed=3, max_tokens=20, ignore_eos=True)
    async with AsyncClient(address) as client:
        whole = (await client.generate(prompt, params)).outputs
        expected = [choice.text for choice in whole]
        others = [text for index, text in enumerate(expected) if index != 2]
        # A word of choice 2 that no other has, and how the next word begins.
        words = (f"t{token_id}t" for token_id in whole[2].token_ids[5:-1])
        stop = next(word for word in words if not any(word in text for text in others))
        expected[2] = expected[2].partition(stop)[0]
        texts = [""] * 4
        stop_reasons: dict[int, str | int | None] = {}
        async for delta in client.stream_generate(prompt, replace(params, stop=stop)):
            for output in delta.outputs:
                texts[output.index] += output.text
                if output.finish_reason is not None:
                    stop_reasons[output.index] = output.stop_reason
    assert texts == expected
    assert stop_reasons == {0: None, 1: None, 2: stop, 3: None}


async def test_a_disconnect_frees_the_blocks_of_all_choices(address: str, watch: PoolWatch) -> None:
    async with AsyncClient(address) as client:
        stream = client.stream_generate([1, 2, 3, 4, 5, 6, 7], replace(LONG, n=4, temperature=1))
        seen: set[int] = set()
        async for delta in stream:
            seen |= {output.index for output in delta.outputs}
            if len(seen) == 4:
                break
        await stream.aclose()
        await until(lambda: watch.num_held == 0, "the blocks' return", timeout_s=1.0)


async def test_keys_of_finished_requests_have_a_time_to_live(
    address: str, redis_server: EmbeddedRedis, watch: PoolWatch
) -> None:
    async with AsyncClient(address) as client:
        await client.generate("t3 t4", SamplingParams(max_tokens=2), request_id="kept")
    await until(lambda: not watch.live_requests(), "the records' ends")
    with redis.Redis.from_url(redis_server.url) as server:
        keys = server.keys("quire:{shard:0}:request:*kept*")
        assert keys
        assert all(0 < server.ttl(key) <= 30 for key in keys)


def test_the_readme_s_python_example(address: str) -> None:
    with LLM(target=address) as llm:
        prompts = ["t1 t2 t3", "t9"]
        params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=4)
        outputs = llm.generate(prompts, params)
    assert [output.prompt for output in outputs] == prompts
    assert all(len(output.outputs[0].text.split()) <= 4 for output in outputs)
