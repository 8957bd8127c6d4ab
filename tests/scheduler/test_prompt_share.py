"""Prompts in steps that also decode: few enough tokens that the step stays short."""

import pytest
from checking_worker import CheckingWorker
from scheduler_stack import check_outputs, prompt, running_stack
from waiting import until

from quire.internal.v1 import worker_pb2
from scheduler_svc.lane.prompt_share import UNLIMITED, PromptShare


def test_there_is_no_limit_before_a_prompt_was_measured() -> None:
    share = PromptShare(0.25)
    assert share.max_tokens == UNLIMITED
    share.decoded(0.05)
    assert share.max_tokens == UNLIMITED


def test_prompts_get_the_time_that_decodes_leave() -> None:
    share = PromptShare(0.25)
    # 1 ms per token.
    share.prefilled(2000, decodes=False, step_s=2.0)
    assert share.max_tokens == 250
    share.decoded(0.05)
    assert share.max_tokens == 200


def test_prompts_get_as_much_time_as_decodes_take() -> None:
    share = PromptShare(0.25)
    share.prefilled(2000, decodes=False, step_s=2.0)
    share.decoded(0.4)
    assert share.max_tokens == 400


def test_the_time_of_decodes_does_not_count_as_that_of_prompts() -> None:
    share = PromptShare(0.25)
    share.decoded(0.05)
    share.prefilled(200, decodes=True, step_s=0.25)
    assert share.max_tokens == 200


def test_steps_that_take_no_longer_with_prompts_have_no_limit() -> None:
    share = PromptShare(0.25)
    share.decoded(0.2)
    share.prefilled(500, decodes=True, step_s=0.2)
    assert share.max_tokens == UNLIMITED


def test_one_slow_step_is_soon_forgotten() -> None:
    share = PromptShare(0.25)
    share.prefilled(250, decodes=True, step_s=0.25)
    share.prefilled(250, decodes=True, step_s=30.0)
    assert share.max_tokens == 32
    for _ in range(20):
        num_tokens = share.max_tokens
        share.prefilled(num_tokens, decodes=True, step_s=num_tokens / 1000)
    assert share.max_tokens == pytest.approx(250, rel=0.05)


def test_steps_with_few_tokens_do_not_count() -> None:
    share = PromptShare(0.25)
    share.prefilled(31, decodes=True, step_s=1.0)
    assert share.max_tokens == UNLIMITED


def test_zero_seconds_are_no_limit() -> None:
    share = PromptShare(0)
    share.prefilled(2000, decodes=False, step_s=20.0)
    assert share.max_tokens == UNLIMITED


@pytest.mark.parametrize("known_s", [0.0, 0.05, 3.0, 30.0])
def test_what_decodes_take_is_measured_anew_while_prompts_go_on(known_s: float) -> None:
    """More streams decode than before, or the worker was stopped in the last step of decodes."""
    share = PromptShare(0.25)
    share.prefilled(600, decodes=False, step_s=0.6)
    share.decoded(known_s)
    counts = []
    for _ in range(40):
        counts.append(min(share.max_tokens, 2048))
        if counts[-1]:
            share.prefilled(counts[-1], decodes=True, step_s=0.4 + counts[-1] / 1000)
        else:
            share.decoded(0.4)
    assert counts.count(0) == 2
    assert counts[-1] == pytest.approx(400, rel=0.05)


def test_decodes_are_not_measured_anew_while_steps_are_short() -> None:
    share = PromptShare(0.25)
    share.decoded(0.01)
    for _ in range(100):
        share.prefilled(100, decodes=True, step_s=0.1)
        assert share.max_tokens > 200


class SlowWorker(CheckingWorker):
    """Reports 1 ms per token, and as much more for a step with decodes as the test has set."""

    decode_ms = 0

    def __init__(self, num_stages: int = 1) -> None:
        super().__init__(
            1,
            num_blocks=2048,
            num_stages=num_stages,
            block_size=16,
            max_model_len=4096,
            max_num_batched_tokens=1024,
        )
        self.distort = self._be_slow

    def _be_slow(self, result: worker_pb2.StepResult) -> None:
        plan = next(plan for plan in self.plans if plan.step == result.step)
        counts = plan.schedule.num_scheduled_tokens
        decode_ms = self.decode_ms if 1 in counts else 0
        result.times.forward_ns = 1_000_000 * (sum(counts) + decode_ms)

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """By step with a prompt: the rows that decode, and the tokens of prompts."""
        steps = [list(plan.schedule.num_scheduled_tokens) for plan in self.plans]
        return [
            (counts.count(1), sum(counts) - counts.count(1))
            for counts in steps
            if max(counts, default=0) > 1
        ]


@pytest.mark.parametrize(("max_prefill_s", "most"), [(0.25, 250), (0, 1024)])
async def test_a_long_prompt_is_computed_in_smaller_steps_while_others_decode(
    redis_url, sockets, max_prefill_s, most
):
    worker = SlowWorker()
    async with running_stack(
        redis_url, sockets, {"a": worker}, max_prefill_s=max_prefill_s, max_num_batched_tokens=1024
    ) as stack:
        gateway = await stack.gateway()
        first = gateway.received[await gateway.submit(prompt(600), max_tokens=400, seed=1)]
        await until(lambda: len(first.token_ids) > 20, "decoding")
        await gateway.submit(prompt(2000, 3), max_tokens=3, seed=2)
        await check_outputs(gateway)
        # Alone, a prompt gets the whole budget.
        assert worker.chunks[0] == (0, 600)
        beside = [num_tokens for num_decodes, num_tokens in worker.chunks if num_decodes]
        assert most - 10 <= max(beside) <= most
        assert len(beside) >= 2000 // most
        await worker.check()


async def test_prompts_are_computed_in_smaller_steps_while_another_stage_decodes(
    redis_url, sockets
):
    worker = SlowWorker(num_stages=2)
    async with running_stack(
        redis_url, sockets, {"a": worker}, max_num_batched_tokens=1024
    ) as stack:
        gateway = await stack.gateway()
        first = gateway.received[await gateway.submit(prompt(600), max_tokens=400, seed=1)]
        await until(lambda: len(first.token_ids) > 20, "decoding")
        await gateway.submit(prompt(2000, 3), max_tokens=3, seed=2)
        await check_outputs(gateway)
        assert worker.chunks[0] == (0, 600)
        assert max(num_tokens for _, num_tokens in worker.chunks[1:]) <= 250
        await worker.check()


async def test_prompts_get_as_much_time_as_decodes_take_if_these_have_become_more(
    redis_url, sockets
):
    """No step has decodes alone but those that measure them."""
    worker = SlowWorker()
    worker.decode_ms = 400
    async with running_stack(
        redis_url, sockets, {"a": worker}, max_num_batched_tokens=1024
    ) as stack:
        gateway = await stack.gateway()
        for seed in range(5):
            await gateway.submit(prompt(3000, seed), max_tokens=200, seed=seed)
        await check_outputs(gateway)
        beside = [num_tokens for num_decodes, num_tokens in worker.chunks if num_decodes]
        assert max(beside[-8:-1]) >= 380
        await worker.check()
