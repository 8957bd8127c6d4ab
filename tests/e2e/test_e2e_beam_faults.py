"""Beam searches of the demo model while workers and the leader are killed, in real processes."""

import asyncio

import pytest
import redis
from pool_watch import PoolWatch
from waiting import until

from quire.client.async_client import AsyncClient
from quire.client.outputs import BeamSearchOutput
from quire.client.sampling_params import BeamSearchParams
from quire.launcher.redis import EmbeddedRedis
from quire.launcher.stack import LocalStack

SETTINGS = {"QUIRE_WORKER_DTYPE": "float32", "QUIRE_WORKER_THREADS": "1"}
PROMPTS = ["Return the number of", "Raise an exception if", "The name of the file", "Open a"]


async def searched(client: AsyncClient, max_tokens: int) -> list[BeamSearchOutput]:
    params = BeamSearchParams(beam_width=4, max_tokens=max_tokens, ignore_eos=True)
    return await asyncio.gather(*(client.beam_search(prompt, params) for prompt in PROMPTS))


@pytest.mark.slow
@pytest.mark.parametrize("role", ["worker", "scheduler"])
async def test_a_killed_process_does_not_change_the_result(
    role: str, redis_server: EmbeddedRedis
) -> None:
    with (
        redis.Redis.from_url(redis_server.url) as records,
        LocalStack(
            "demo/model",
            num_workers=2,
            num_schedulers=2,
            redis_url=redis_server.url,
            settings=SETTINGS,
            restart=True,
        ) as stack,
    ):
        watch = PoolWatch(records)
        async with AsyncClient(stack.address) as client:
            expected = await searched(client, 80)
            await until(lambda: watch.num_held == 0, "the blocks' return")
            again = asyncio.create_task(searched(client, 80))
            # The beams have a block each: they are past their first steps.
            await until(lambda: watch.num_held >= 16, "searches in progress")
            victim = stack.leader() if role == "scheduler" else stack.processes("worker")[0]
            assert victim is not None
            victim.kill()
            found = await again
        records.flushall()
    for one, other in zip(expected, found, strict=True):
        tokens = [sequence.token_ids for sequence in one.sequences]
        assert [sequence.token_ids for sequence in other.sequences] == tokens
        scores = [sequence.score for sequence in one.sequences]
        assert [s.score for s in other.sequences] == pytest.approx(scores, abs=1e-4)
