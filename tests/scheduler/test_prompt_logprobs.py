"""Log-probabilities of prompts: delivered once, with the first token, whatever happened before. The
gateway of these tests checks their values."""

from collections.abc import Iterable

import pytest
from checking_worker import CheckingWorker
from scheduler_stack import prompt, running_stack
from waiting import until

from quire.internal.v1 import worker_pb2


def computed(plans: Iterable[worker_pb2.BatchPlan]) -> list[int]:
    """`num_computed_tokens` of all admissions."""
    return [count for plan in plans for count in plan.admissions.num_computed_tokens]


async def test_they_come_with_the_first_token_of_the_first_choice(redis_url, sockets):
    async with running_stack(redis_url, sockets, {"a": CheckingWorker(1)}) as stack:
        gateway = await stack.gateway()
        for index, (length, count, n) in enumerate([(9, 1, 1), (1, 4, 2), (40, 21, 3), (9, 0, 1)]):
            await gateway.submit(
                prompt(length, index), seed=index, n=n, num_prompt_logprobs=count, num_logprobs=n
            )
        assert all(received.is_whole for received in await gateway.wait_ended())


@pytest.mark.parametrize("budget", [8, 32])
async def test_a_chunked_prompt_has_them_of_all_chunks(redis_url, sockets, budget):
    worker = CheckingWorker(1)
    async with running_stack(
        redis_url, sockets, {"a": worker}, max_num_batched_tokens=budget
    ) as stack:
        gateway = await stack.gateway()
        for tag in range(3):
            await gateway.submit(prompt(41, tag), seed=tag, n=2, num_prompt_logprobs=2)
        assert all(received.is_whole for received in await gateway.wait_ended())


async def test_a_cached_prefix_is_computed_again_and_serves_others(redis_url, sockets):
    worker = CheckingWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        for tag, count, cached in ((0, 0, 0), (0, 1, 0), (0, 0, 20), (1, 3, 0), (1, 0, 20)):
            [received] = await gateway.wait_ended(
                await gateway.submit(prompt(22, tag), num_prompt_logprobs=count)
            )
            assert received.is_whole
            assert received.end.num_cached_prompt_tokens == cached


async def test_a_lost_worker_computes_the_missing_ones_again(redis_url, sockets):
    """The worker breaks its stream in the middle of a prompt; what it has returned is kept."""
    worker = CheckingWorker(1)
    async with running_stack(
        redis_url, sockets, {"a": worker}, max_num_batched_tokens=8, pipeline_depth=1
    ) as stack:
        gateway = await stack.gateway()
        results = []

        def distort(result: worker_pb2.StepResult) -> None:
            results.append(result.step)
            if len(results) == 3:
                result.step = 12345

        worker.distort = distort
        [received] = await gateway.wait_ended(
            await gateway.submit(prompt(41), num_prompt_logprobs=1)
        )
        assert received.is_whole
        assert worker.num_streams == 2
        # Two results of eight tokens each had arrived, and the pool has their blocks.
        assert computed(worker.plans) == [0, 16]


async def test_a_request_after_its_first_token_uses_the_cache_again(redis_url, sockets):
    worker = CheckingWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}, pipeline_depth=1) as stack:
        gateway = await stack.gateway()
        results = []

        def distort(result: worker_pb2.StepResult) -> None:
            results.append(result.step)
            if len(results) == 3:
                result.step = 12345

        worker.distort = distort
        [received] = await gateway.wait_ended(
            await gateway.submit(prompt(22), max_tokens=6, num_prompt_logprobs=1)
        )
        assert received.is_whole
        assert computed(worker.plans) == [0, 20]


@pytest.mark.parametrize("num_tokens", [0, 3])
async def test_a_new_leader_delivers_them_once(redis_url, sockets, num_tokens):
    """Before the first token they are computed again; after it they are in the journal."""
    worker = CheckingWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}, max_num_batched_tokens=8) as stack:
        gateway = await stack.gateway()
        if num_tokens:
            worker.hold_after = num_tokens
        else:
            worker.gate.clear()
        attachment = await gateway.submit(
            prompt(22), max_tokens=9, num_prompt_logprobs=2, num_logprobs=1
        )
        received = gateway.received[attachment]
        await until(lambda: received.accepted, "the acceptance")
        await until(lambda: len(received.token_ids) >= num_tokens - 1, "the first tokens")
        await stack.member.kill()
        stack.expire_lease(stack.member)
        stack.start_scheduler()
        gateway = await stack.gateway()
        worker.gate.set()
        [again] = await gateway.wait_ended(await gateway.submit_again(received))
        assert again.is_whole
        # Another gateway attaches to the ended request, from the start and from its middle.
        for next_index in (0, 1):
            [replayed] = await gateway.wait_ended(await gateway.attach(received, next_index))
            assert replayed.is_whole


async def test_more_than_workers_support_are_refused(redis_url, sockets):
    async with running_stack(redis_url, sockets, {"a": CheckingWorker(1)}) as stack:
        gateway = await stack.gateway()
        [received] = await gateway.wait_ended(
            await gateway.submit(prompt(9), num_prompt_logprobs=22)
        )
        assert received.failure.code == 3
