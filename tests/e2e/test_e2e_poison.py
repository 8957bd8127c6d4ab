"""A request that kills every worker that runs it, among others that do not."""

import asyncio

import pytest

from quire import AsyncClient, QuireError, RequestOutput, SamplingParams
from quire.launcher.stack import LocalStack

POISON = 7
NUM_NEIGHBOURS = 31
NUM_TOKENS = 200
SETTINGS = {
    "QUIRE_WORKER_ENGINE": "sim",
    "QUIRE_WORKER_SIM_STEP_MS": "5",
    "QUIRE_WORKER_SIM_POISON_TOKEN_ID": str(POISON),
}


def outputs_of(results: list[RequestOutput]) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in results]


@pytest.mark.slow
async def test_a_poisonous_request_is_failed_alone():
    with LocalStack("demo/model", num_workers=2, settings=SETTINGS, restart=True) as stack:
        async with AsyncClient(stack.address) as client:

            def ask(prompt: list[int], seed: int) -> asyncio.Task[RequestOutput]:
                params = SamplingParams(max_tokens=NUM_TOKENS, seed=seed, ignore_eos=True)
                return asyncio.create_task(client.generate(prompt, params))

            def ask_neighbours() -> list[asyncio.Task[RequestOutput]]:
                return [ask([20 + seed] * 20, seed) for seed in range(NUM_NEIGHBOURS)]

            undisturbed = await asyncio.gather(*ask_neighbours())
            neighbours = ask_neighbours()
            with pytest.raises(QuireError, match="3 workers in a row crashed"):
                await ask([POISON] * 20, NUM_NEIGHBOURS)
            assert outputs_of(await asyncio.gather(*neighbours)) == outputs_of(undisturbed)
        # The first to die of it, and those on which it ran alone.
        assert sum(process.num_starts for process in stack.processes("worker")) == 2 + 1 + 3
