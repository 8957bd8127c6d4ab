"""Rows that gain several tokens per step: jumps of the simulated worker, through real lanes."""

import pytest
from checking_worker import CheckingWorker, token_at
from scheduler_stack import check_outputs, prompt, running_stack
from waiting import until

from quire.internal.v1 import worker_pb2

LOOKAHEAD = 16


def jumping_worker(incarnation: int = 1, **pool: int) -> CheckingWorker:
    """After token t a row jumps `t % 8` tokens further, as far as its look-ahead allows."""
    return CheckingWorker(incarnation, longest_jump=7, **pool)


def num_jumped(results: list[worker_pb2.StepResult]) -> int:
    return sum(len(result.forced_indices) for result in results)


def recorded(worker: CheckingWorker) -> list[worker_pb2.StepResult]:
    """The results that the worker sends from now on."""
    results: list[worker_pb2.StepResult] = []
    worker.distort = results.append
    return results


def num_passes(results: list[worker_pb2.StepResult]) -> int:
    """Forward passes that computed or sampled something."""
    return sum(bool(len(result.lookahead_rows)) for result in results)


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("block_size", [2, 4, 16])
async def test_jumps_change_no_token_and_save_steps(redis_url, sockets, depth, block_size):
    worker = jumping_worker(num_blocks=1 + 256 // block_size, block_size=block_size)
    results = recorded(worker)
    async with running_stack(redis_url, sockets, {"a": worker}, pipeline_depth=depth) as stack:
        gateway = await stack.gateway()
        for seed in range(4):
            await gateway.submit(
                prompt(9, seed), max_tokens=40, seed=seed, num_lookahead_tokens=LOOKAHEAD
            )
        await check_outputs(gateway)
        assert num_jumped(results) > 40
        assert num_passes(results) < 40
        await worker.check()


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("num_prompt_tokens", [7, 8, 30])
async def test_rows_that_wait_for_their_grammars_get_the_same_tokens(
    redis_url, sockets, depth, num_prompt_tokens
):
    """Also if others share the last block of the prompt, and where the output is short."""
    worker = jumping_worker(num_blocks=128, num_holds=5)
    async with running_stack(redis_url, sockets, {"a": worker}, pipeline_depth=depth) as stack:
        gateway = await stack.gateway()
        for seed in range(3):
            await gateway.submit(
                prompt(num_prompt_tokens), 20, seed, num_lookahead_tokens=LOOKAHEAD
            )
        await gateway.submit(prompt(num_prompt_tokens), 12, 7, n=3, num_lookahead_tokens=LOOKAHEAD)
        await gateway.submit(prompt(num_prompt_tokens, 1), 1, 9, num_lookahead_tokens=LOOKAHEAD)
        described = {"num_logprobs": 2, "num_prompt_logprobs": 1}
        await gateway.submit(prompt(40, 2), 9, 10, num_lookahead_tokens=LOOKAHEAD, **described)
        await gateway.submit(prompt(num_prompt_tokens + 9), 20, 11)
        await check_outputs(gateway)
        assert worker.runner._held.total() == 5 * 8
        await worker.check()


async def test_a_sequence_ends_within_a_jump(redis_url, sockets):
    seed = next(one for one in range(99) if token_at(one, 8) % 8 == 5)
    stop = token_at(seed, 10)
    worker = jumping_worker()
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        one = await gateway.submit(
            prompt(8), 30, seed, stop_token_ids=(stop,), num_lookahead_tokens=LOOKAHEAD
        )
        other = await gateway.submit(prompt(8), 4, seed, num_lookahead_tokens=LOOKAHEAD)
        by_token, by_length = await gateway.wait_ended(one, other)
        assert by_token.token_ids == by_token.tokens(3)
        assert by_length.token_ids == by_length.tokens(4)
        await worker.check()


async def test_a_row_with_log_probabilities_does_not_jump(redis_url, sockets):
    worker = jumping_worker()
    results = recorded(worker)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        await gateway.submit(prompt(8), 9, num_logprobs=2, num_lookahead_tokens=LOOKAHEAD)
        await check_outputs(gateway)
        assert num_jumped(results) == 0


async def test_a_jump_without_blocks_is_computed_later_and_preempts_nothing(redis_url, sockets):
    # Two sequences of 8 blocks need 16; the pool has 17 with the null block.
    worker = jumping_worker(num_blocks=17, block_size=4, max_model_len=32)
    results = recorded(worker)
    async with running_stack(redis_url, sockets, {"a": worker}, watermark=0) as stack:
        gateway = await stack.gateway()
        for seed in range(2):
            await gateway.submit(
                prompt(5, seed), max_tokens=27, seed=seed, num_lookahead_tokens=LOOKAHEAD
            )
        await check_outputs(gateway)
        assert num_jumped(results) > 10
        assert all(len(plan.admissions.rows) <= 2 for plan in worker.plans)
        assert sum(len(plan.admissions.rows) for plan in worker.plans) == 2
        await worker.check()


async def test_choices_jump_each_for_itself(redis_url, sockets):
    worker = jumping_worker(num_blocks=128)
    results = recorded(worker)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        await gateway.submit(prompt(9), 20, n=4, num_lookahead_tokens=LOOKAHEAD)
        await gateway.submit(prompt(9, 1), 1, n=3, num_lookahead_tokens=LOOKAHEAD)
        await check_outputs(gateway)
        assert num_jumped(results) > 20
        await worker.check()


async def test_unary_requests_jump_within_rounds(redis_url, sockets, monkeypatch):
    monkeypatch.setattr("scheduler_svc.lane.multi_step._SHARE", 1000)
    worker = jumping_worker(num_blocks=128)
    results = recorded(worker)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        for seed in range(3):
            await gateway.submit(
                prompt(9, seed),
                50,
                seed,
                num_lookahead_tokens=LOOKAHEAD,
                deferred_delivery=True,
            )
        await check_outputs(gateway)
        assert any(result.round_sizes for result in results)
        assert num_jumped(results) > 40
        await worker.check()


async def test_a_sequence_goes_on_elsewhere_after_a_jump(redis_url, sockets):
    workers = {name: jumping_worker(at) for at, name in enumerate(("a", "b"), 1)}
    async with running_stack(redis_url, sockets, dict(workers)) as stack:
        gateway = await stack.gateway()
        workers["a"].hold_after = 12
        attachments = [
            await gateway.submit(prompt(9, seed), 40, seed, num_lookahead_tokens=LOOKAHEAD)
            for seed in range(4)
        ]
        await until(lambda: workers["a"].is_held_back, "a step of the worker to be lost")
        await stack.stop_worker("a")
        await gateway.wait_ended(*attachments)
        await check_outputs(gateway)
        await workers["b"].check()


@pytest.mark.parametrize(
    "broken",
    [
        lambda result: result.num_computed_tokens.pop(),
        lambda result: result.lookahead_rows.pop(),
        lambda result: result.sampled_rows.extend([result.sampled_rows[0]] * 99),
    ],
)
async def test_a_wrong_report_loses_the_lane_and_no_request(redis_url, sockets, broken):
    worker = jumping_worker()
    has_broken = []

    def distort(result: worker_pb2.StepResult) -> None:
        if result.sampled_rows and not has_broken:
            has_broken.append(broken(result))
            result.sampled_token_ids.extend(
                [1] * (len(result.sampled_rows) - len(result.sampled_token_ids))
            )

    worker.distort = distort
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        await gateway.submit(prompt(9), 20, num_lookahead_tokens=LOOKAHEAD)
        await check_outputs(gateway)
        assert has_broken
        assert worker.num_streams == 2
