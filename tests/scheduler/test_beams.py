"""Beam searches through real lanes, Redis and simulated workers, which check every block."""

import pytest
from beam_requests import beam_worker, likely_stop, submit_search
from checking_worker import CheckingWorker
from scheduler_stack import check_outputs, prompt, running_stack

from scheduler_svc.beams.search import EarlyStopping


def slow(value):
    return pytest.param(value, marks=pytest.mark.slow)


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("block_size", [4, slow(2), slow(16)])
@pytest.mark.parametrize("width", [1, 2, 5, 8])
async def test_a_search_gives_what_its_beams_give_one_by_one(
    redis_url, sockets, depth, block_size, width
):
    worker = beam_worker(num_blocks=1 + 1024 // block_size, block_size=block_size)
    async with running_stack(redis_url, sockets, {"a": worker}, pipeline_depth=depth) as stack:
        gateway = await stack.gateway()
        for seed, length in enumerate((1, 7, 8, 16, 33)):
            await submit_search(gateway, prompt(length, seed), width, 20, seed)
        await check_outputs(gateway)
        await worker.check()


@pytest.mark.parametrize("early_stopping", list(EarlyStopping))
@pytest.mark.parametrize("length_penalty", [2.0, slow(0.0), slow(1.0)])
async def test_searches_end_at_stop_tokens(redis_url, sockets, early_stopping, length_penalty):
    worker = beam_worker(num_blocks=256)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        for seed in range(6):
            stops = tuple({likely_stop(prompt(9), 3, seed, step) for step in (2, 3, 5, 6)})
            await submit_search(
                gateway, prompt(9), 3, 25, seed, stops, length_penalty, early_stopping
            )
        await check_outputs(gateway)
        ended = list(gateway.received.values())
        assert any(len(one.token_ids) < 25 for one in ended) or early_stopping == 3
        assert all(one.search.hypotheses for one in ended)
        await worker.check()


async def test_other_requests_run_beside_searches(redis_url, sockets):
    worker = beam_worker(num_blocks=512, max_num_seqs=24)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        for seed in range(4):
            await submit_search(gateway, prompt(9, seed), 4, 16, seed)
            await gateway.submit(prompt(12, seed), 16, seed)
        await gateway.submit(prompt(9), 16, 77, n=3)
        await check_outputs(gateway)
        await worker.check()


def held_blocks_bound(worker: CheckingWorker) -> float:
    """The largest quotient of the blocks in the rows' tables and those of an ideal sharing."""
    return max(worker.block_ratios)
