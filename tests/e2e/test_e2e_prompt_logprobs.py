"""Log-probabilities of prompts while workers and the scheduler are killed, in real processes."""

import asyncio

import pytest
import redis
from pool_watch import PoolWatch
from waiting import until

from quire import AsyncClient, RequestOutput, SamplingParams
from quire.launcher.redis import EmbeddedRedis
from quire.launcher.stack import LocalStack

NUM_REQUESTS = 12
SETTINGS = {
    "QUIRE_WORKER_ENGINE": "sim",
    "QUIRE_WORKER_SIM_STEP_MS": "10",
    # A prompt takes some steps.
    "QUIRE_SCHEDULER_MAX_NUM_BATCHED_TOKENS": "64",
    "QUIRE_WORKER_MAX_NUM_SEQS": "16",
}


@pytest.mark.slow
async def test_they_are_the_same_after_killed_workers_and_a_killed_scheduler(
    redis_server: EmbeddedRedis,
) -> None:
    with (
        redis.Redis.from_url(redis_server.url) as records,
        LocalStack(
            "demo/model",
            num_workers=2,
            redis_url=redis_server.url,
            settings=SETTINGS,
            restart=True,
        ) as stack,
    ):
        watch = PoolWatch(records)
        async with AsyncClient(stack.address) as client:

            def ask() -> list[asyncio.Task[RequestOutput]]:
                return [
                    asyncio.create_task(
                        client.generate(
                            [seed, *range(100, 300)],
                            SamplingParams(
                                seed=seed, max_tokens=5, prompt_logprobs=2, ignore_eos=True
                            ),
                        )
                    )
                    for seed in range(1, NUM_REQUESTS + 1)
                ]

            undisturbed = await asyncio.gather(*ask())
            for victim in ("worker", "scheduler"):
                await until(lambda: watch.num_held == 0, "the blocks' return")
                requests = ask()
                await until(lambda: watch.num_held > 0, "a prompt in progress")
                stack.processes(victim)[0].kill()
                outputs = await asyncio.gather(*requests)
                assert [output.prompt_logprobs for output in outputs] == [
                    output.prompt_logprobs for output in undisturbed
                ]
                assert [output.outputs for output in outputs] == [
                    output.outputs for output in undisturbed
                ]
        assert undisturbed[0].prompt_logprobs is not None
        assert len(undisturbed[0].prompt_logprobs) == 201
        assert sum(one.num_starts for one in stack.processes("worker")) == 3
        records.flushall()
