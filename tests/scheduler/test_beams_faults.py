"""Beam searches when rows, blocks, workers or leaders are lost; all end with the same sequences."""

from collections import Counter

import pytest
from beam_requests import ReceivedSearch, beam_worker, submit_search
from scheduler_load import FAILED_PRECONDITION, INVALID_ARGUMENT
from scheduler_stack import CANCELLED, Stack, check_outputs, info_of, prompt, running_stack
from waiting import until


async def running_search(stack: Stack, num_steps: int = 5, **params: object) -> ReceivedSearch:
    """A search of which some steps have been journaled."""
    gateway = await stack.gateway()
    attachment = await submit_search(gateway, prompt(9), **{"max_tokens": 40, **params})
    received = gateway.received[attachment]
    await until(lambda: len(received.token_ids) >= num_steps, "some steps")
    assert isinstance(received, ReceivedSearch)
    return received


@pytest.mark.parametrize("num_host_blocks", [0, 64], ids=["recomputed", "swapped"])
@pytest.mark.parametrize(
    "batch_policy", ["chunked", pytest.param("prefill_first", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
async def test_searches_are_preempted_whole(
    redis_url, sockets, num_host_blocks, batch_policy, enable_prefix_caching
):
    worker = beam_worker(num_blocks=48, num_host_blocks=num_host_blocks, max_num_seqs=16)
    async with running_stack(
        redis_url,
        sockets,
        {"a": worker},
        batch_policy=batch_policy,
        enable_prefix_caching=enable_prefix_caching,
    ) as stack:
        gateway = await stack.gateway()
        for seed in range(4):
            await submit_search(gateway, prompt(9, seed), 4, 30, seed)
            await gateway.submit(prompt(5, seed), 30, seed)
        await check_outputs(gateway)
        lane = stack.only_lane
        assert (worker.num_swapped_blocks > 0) == (num_host_blocks > 0)
        assert lane.stats.num_preempted_by_recompute + lane.stats.num_preempted_by_swap > 0
        assert lane.table.swap_space.num_free == num_host_blocks
        assert not lane.table.beam_groups
        await worker.check()


async def test_a_search_that_the_cache_cannot_hold_fails_alone(redis_url, sockets):
    worker = beam_worker(num_blocks=17, max_model_len=64)
    async with running_stack(redis_url, sockets, {"a": worker}, watermark=0) as stack:
        gateway = await stack.gateway()
        search = await submit_search(gateway, prompt(9), 8, 50)
        other = await gateway.submit(prompt(9, 1), 20)
        failed, ended = await gateway.wait_ended(search, other)
        assert failed.failure.code == FAILED_PRECONDITION
        assert info_of(failed.failure).reason == "CACHE_TOO_SMALL"
        assert ended.is_whole
        await worker.check()


async def test_a_search_with_more_beams_than_rows_is_refused(redis_url, sockets):
    async with running_stack(redis_url, sockets, {"a": beam_worker(max_num_seqs=3)}) as stack:
        gateway = await stack.gateway()
        [failed] = await gateway.wait_ended(await submit_search(gateway, prompt(9), 4))
        assert failed.failure.code == INVALID_ARGUMENT
        assert info_of(failed.failure).reason == "BEAM_WIDTH_OUT_OF_RANGE"


async def test_a_search_runs_where_there_are_enough_rows(redis_url, sockets):
    workers = {"a": beam_worker(1, max_num_seqs=3), "b": beam_worker(2, max_num_seqs=8)}
    async with running_stack(redis_url, sockets, dict(workers)) as stack:
        # A worker's stream may be open before the scheduler knows its rows.
        await until(lambda: len(stack.engine.lanes) == 2, "both lanes")
        gateway = await stack.gateway()
        for seed in range(3):
            await submit_search(gateway, prompt(9, seed), 5, 8, seed)
        await check_outputs(gateway)
        assert not workers["a"].plans


async def test_cancelled_searches_return_their_blocks(redis_url, sockets):
    worker = beam_worker(num_blocks=128)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        received = await running_search(stack)
        [gateway] = stack.gateways
        worker.gate.clear()
        await gateway.cancel(received.submission.attachment)
        worker.gate.set()
        await until(lambda: received.failure is not None, "the cancellation")
        assert received.failure.code == CANCELLED
        await worker.check()
        await until(lambda: stack.only_lane.is_empty, "an empty lane")
        assert stack.only_lane.num_free_blocks == 127


async def test_a_failing_row_ends_the_search(redis_url, sockets):
    worker = beam_worker(num_blocks=128)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        received = await running_search(stack, seed=3)
        worker.failing_seeds.add(3)
        await until(lambda: received.failure is not None, "the failure")
        assert info_of(received.failure).reason == "ROW_FAILED"
        await worker.check()


@pytest.mark.parametrize("num_steps", [1, 5, 17])
async def test_a_search_goes_on_at_another_worker(redis_url, sockets, num_steps):
    workers = {"a": beam_worker(1, num_blocks=128), "b": beam_worker(2, num_blocks=128)}
    async with running_stack(redis_url, sockets, dict(workers)) as stack:
        received = await running_search(stack, num_steps)
        name = next(name for name, worker in workers.items() if worker.plans)
        await stack.stop_worker(name)
        await check_outputs(stack.gateways[0])
        assert received.is_whole
        [other] = [worker for key, worker in workers.items() if key != name]
        await other.check()


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "drained"])
@pytest.mark.parametrize("num_steps", [1, 6])
@pytest.mark.slow
async def test_a_new_leader_goes_on_with_a_search(redis_url, sockets, is_killed, num_steps):
    worker = beam_worker(num_blocks=128)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        received = await running_search(stack, num_steps)
        previous, successor = stack.member, stack.start_scheduler()
        await until(lambda: successor.is_standby, "a standby")
        if is_killed:
            await previous.kill()
            stack.expire_lease(previous)
        else:
            await previous.drain()
        gateway = await stack.gateway()
        again = gateway.received[await gateway.submit_again(received)]
        await gateway.wait_ended()
        assert again.is_whole
        await worker.check()


async def test_a_finished_search_is_sent_again(redis_url, sockets):
    async with running_stack(redis_url, sockets, {"a": beam_worker(num_blocks=128)}) as stack:
        received = await running_search(stack, max_tokens=8)
        [gateway] = stack.gateways
        await check_outputs(gateway)
        await until(lambda: not stack.engine.live, "the end of the search")
        await gateway.submit_again(received)
        await check_outputs(gateway)


@pytest.mark.parametrize("num_stages", [1, 3])
async def test_a_drained_worker_gives_its_searches_to_another(redis_url, sockets, num_stages):
    model = {"num_blocks": 128, "num_stages": num_stages}
    workers = {"a": beam_worker(1, **model), "b": beam_worker(2, **model)}
    async with running_stack(redis_url, sockets, dict(workers)) as stack:
        received = await running_search(stack, 6)
        busy = next(worker for worker in workers.values() if worker.plans)
        busy.drain()
        await check_outputs(stack.gateways[0])
        assert received.is_whole
        assert all(worker.plans for worker in workers.values())


async def test_a_search_moves_again_before_it_has_forked(redis_url, sockets):
    """The steps of the first worker, of a higher number, are not those of the second one."""
    workers = [beam_worker(incarnation, num_blocks=128) for incarnation in range(1, 4)]
    async with running_stack(redis_url, sockets, dict(zip("abc", workers, strict=True))) as stack:
        received = await running_search(stack, 6)
        first, *others = sorted(workers, key=lambda worker: -len(worker.plans))
        for worker in others:
            worker.gate.clear()
        first.drain()
        await until(lambda: any(worker.is_held_back for worker in others), "the search to move")
        next(worker for worker in others if worker.is_held_back).drain()
        for worker in others:
            worker.gate.set()
        await check_outputs(stack.gateways[0])
        assert received.is_whole
        assert all(worker.plans for worker in workers)


async def test_beams_that_have_moved_wait_for_prompts_in_stages(redis_url, sockets):
    workers = [beam_worker(incarnation, num_blocks=128, num_stages=2) for incarnation in (1, 2)]
    async with running_stack(
        redis_url,
        sockets,
        dict(zip("ab", workers, strict=True)),
        batch_policy="prefill_first",
    ) as stack:
        received = await running_search(stack, 25)
        first, second = sorted(workers, key=lambda worker: -len(worker.plans))
        second.gate.clear()
        first.drain()
        await until(lambda: second.is_held_back, "the search to move")
        # Prompts precede the beams when these are forked.
        for tag in range(1, 5):
            await stack.gateways[0].submit(prompt(40, tag), 1)
        lane = stack.engine.lanes[second.hello.incarnation]
        await until(lambda: lane.assigned, "prompts that wait")
        second.gate.set()
        await check_outputs(stack.gateways[0])
        assert received.is_whole


def distinct_prefixes(paths: list[list[int]], block_size: int) -> int:
    """Blocks of an ideal sharing: one per distinct content and prefix."""
    ends = [range(block_size, len(path) + block_size, block_size) for path in paths]
    return len({tuple(path[:end]) for path, of in zip(paths, ends, strict=True) for end in of})


@pytest.mark.parametrize("width", [2, 4, 8])
async def test_beams_share_their_blocks(redis_url, sockets, width):
    """The blocks that a search holds are at most 1.5 times those of an ideal sharing."""
    worker = beam_worker(num_blocks=512, max_model_len=256, max_num_batched_tokens=256)
    held: list[int] = []
    async with running_stack(redis_url, sockets, {"a": worker}, pipeline_depth=3) as stack:
        gateway = await stack.gateway()
        rows = stack.only_lane.rows
        worker.distort = lambda result: held.append(len(+Counter(rows.references)))
        attachment = await submit_search(gateway, prompt(70), width, 120)
        await check_outputs(gateway)
        received = gateway.received[attachment]
    assert isinstance(received, ReceivedSearch)
    ideal = ideal_blocks(received)
    # The first result is that of the prompt; no row runs after the last one.
    assert len(held) >= len(ideal)
    assert all(have <= 1.5 * best for have, best in zip(held[: len(ideal)], ideal, strict=True)), (
        list(zip(held, ideal, strict=False))
    )


def ideal_blocks(received: ReceivedSearch) -> list[int]:
    """By step, the blocks of the tokens that it has computed."""
    tokens = list(received.submission.prompt_token_ids)
    paths: list[list[int]] = [tokens]
    counts = []
    for step in received.search.steps:
        counts.append(distinct_prefixes(paths, 4))
        paths = [[*paths[one.parent], one.token_id] for one in step.running]
    return counts
