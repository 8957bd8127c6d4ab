"""Workers that speculate: drafts of the simulated worker, through real lanes."""

import pytest
from checking_worker import CheckingWorker
from scheduler_stack import check_outputs, prompt, running_stack
from waiting import until

from quire.internal.v1 import worker_pb2
from scheduler_svc.core.stats import LaneStats


def recorded(worker: CheckingWorker) -> list[worker_pb2.StepResult]:
    """The results that the worker sends from now on."""
    results: list[worker_pb2.StepResult] = []
    worker.distort = results.append
    return results


def num_drafted(results: list[worker_pb2.StepResult]) -> int:
    return sum(sum(result.num_draft_tokens) for result in results)


def num_accepted(results: list[worker_pb2.StepResult]) -> int:
    return sum(sum(result.num_accepted_tokens) for result in results)


def check_positions(stats: LaneStats, results: list[worker_pb2.StepResult], most: int) -> None:
    """The counts by position are those of the results, and fewer drafts have more before them."""
    for counted, name in (
        (stats.draft_tokens, "num_draft_tokens"),
        (stats.accepted_tokens, "num_accepted_tokens"),
    ):
        sent = [getattr(result, name) for result in results]
        expected = [sum(one[at] for one in sent if at < len(one)) for at in range(most)]
        assert [counted[at] for at in range(most)] == expected
        assert sorted(expected, reverse=True) == expected
        assert expected[-1] > 0
    sampled = sum(len(result.sampled_rows) - len(result.forced_indices) for result in results)
    assert stats.num_row_steps == sampled - num_accepted(results)


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize(("most", "block_size"), [(1, 2), (3, 4), (5, 16)])
async def test_drafts_change_no_token_and_save_steps(redis_url, sockets, depth, most, block_size):
    worker = CheckingWorker(
        1, 1 + 512 // block_size, block_size, num_speculative_tokens=most, max_num_batched_tokens=64
    )
    results = recorded(worker)
    async with running_stack(redis_url, sockets, {"a": worker}, pipeline_depth=depth) as stack:
        gateway = await stack.gateway()
        for seed in range(4):
            await gateway.submit(prompt(9, seed), max_tokens=40, seed=seed)
        await check_outputs(gateway)
        # A result that ends nothing may arrive after the last output.
        stats = stack.only_lane.stats
        await until(lambda: stats.draft_tokens.total() == num_drafted(results), "the last result")
        assert 0.2 * num_drafted(results) < num_accepted(results) < num_drafted(results)
        # A step without drafts gives each row a token.
        assert sum(bool(result.sampled_rows) for result in results) < (36, 30, 26)[most // 2]
        await worker.check()
        check_positions(stats, results, most)


@pytest.mark.parametrize("rate", [0.0, 1.0])
async def test_all_drafts_or_none_are_right(redis_url, sockets, rate):
    """Blocks add up after every step, and all are free at the end."""
    worker = CheckingWorker(1, num_blocks=40, num_speculative_tokens=4, acceptance_rate=rate)
    results = recorded(worker)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        for seed in range(3):
            await gateway.submit(prompt(9, seed), max_tokens=41, seed=seed)
        await check_outputs(gateway)
        stats, lane = stack.only_lane.stats, stack.only_lane
        await until(lambda: lane.num_free_blocks == 39, "the release of all blocks")
        assert num_drafted(results) > 0
        if not rate:
            assert stats.num_row_steps >= 3 * 41
        # Drafts are cut where blocks have no room for them yet.
        assert num_accepted(results) == rate * num_drafted(results)
        await worker.check()


@pytest.mark.parametrize("depth", [1, 2, 4])
async def test_blocks_have_room_for_the_drafts_of_plans_in_flight(redis_url, sockets, depth):
    worker = CheckingWorker(
        1, 40, 16, max_model_len=112, num_speculative_tokens=4, acceptance_rate=1.0
    )
    results: list[worker_pb2.StepResult] = []

    def hold(result: worker_pb2.StepResult) -> None:
        results.append(result)
        worker.gate.clear()

    worker.gate.clear()
    worker.distort = hold
    async with running_stack(redis_url, sockets, {"a": worker}, pipeline_depth=depth) as stack:
        gateway = await stack.gateway()
        await gateway.submit(prompt(9), max_tokens=101)
        for number in range(15):
            await until(lambda: len(worker.rows_in_flight) == depth, "a full pipeline")
            worker.gate.set()
            await until(lambda count=number: len(results) > count, "a result")
        worker.distort = results.append
        worker.gate.set()
        await check_outputs(gateway)
        # The prompt's step, and steps of four drafts and one more token across ends of blocks.
        assert [len(result.sampled_rows) for result in results][:21] == [1, *[5] * 20]
        await worker.check()


async def test_choices_logprobs_and_jumps_beside_one_another(redis_url, sockets):
    worker = CheckingWorker(1, 160, num_speculative_tokens=4, longest_jump=7)
    results = recorded(worker)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        await gateway.submit(prompt(9), 20, 1, n=4)
        await gateway.submit(prompt(9, 1), 12, 2, num_logprobs=2, num_prompt_logprobs=1)
        await gateway.submit(prompt(30, 2), 20, 3, num_lookahead_tokens=16)
        await gateway.submit(prompt(5, 3), 1, 4, n=2)
        await check_outputs(gateway)
        assert num_accepted(results) > 10
        assert any(result.forced_indices for result in results)
        await worker.check()


async def test_requests_without_drafts_get_none(redis_url, sockets):
    worker = CheckingWorker(1, 160, num_speculative_tokens=4, longest_jump=7)
    results = recorded(worker)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        await gateway.submit(prompt(9), 20, 1, n=4, without_drafts=True)
        # Jumps need look-ahead, which drafts do not use.
        await gateway.submit(prompt(30, 2), 20, 3, num_lookahead_tokens=16, without_drafts=True)
        await check_outputs(gateway)
        assert num_drafted(results) == 0
        assert any(result.forced_indices for result in results)
        # The jumps of a row may leave no room for drafts.
        for seed in range(2, 6):
            await gateway.submit(prompt(9, 1), 20, seed)
        await check_outputs(gateway)
        assert num_drafted(results) > 0
        await worker.check()


async def test_drafts_without_blocks_are_left_out_and_preempt_nothing(redis_url, sockets):
    # Two sequences of 8 blocks need 16; the pool has 17 with the null block.
    worker = CheckingWorker(1, 17, 4, max_model_len=32, num_speculative_tokens=5)
    results = recorded(worker)
    async with running_stack(redis_url, sockets, {"a": worker}, watermark=0) as stack:
        gateway = await stack.gateway()
        for seed in range(2):
            await gateway.submit(prompt(5, seed), max_tokens=27, seed=seed)
        await check_outputs(gateway)
        assert num_accepted(results) > 5
        assert sum(len(plan.admissions.rows) for plan in worker.plans) == 2
        await worker.check()


async def test_a_sequence_goes_on_where_nothing_is_speculated(redis_url, sockets):
    workers = {
        "a": CheckingWorker(1, num_speculative_tokens=3),
        "b": CheckingWorker(2),
    }
    async with running_stack(redis_url, sockets, dict(workers)) as stack:
        gateway = await stack.gateway()
        workers["a"].hold_after = 12
        attachments = [await gateway.submit(prompt(9, seed), 40, seed) for seed in range(4)]
        await until(lambda: workers["a"].is_held_back, "a step of the worker to be lost")
        await stack.stop_worker("a")
        await gateway.wait_ended(*attachments)
        await check_outputs(gateway)
        await workers["b"].check()
