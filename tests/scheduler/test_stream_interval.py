"""Streams that receive several tokens together, through the whole scheduler."""

import pytest
from checking_worker import CheckingWorker, rounds_of
from scheduler_stack import check_outputs, prompt, running_stack
from waiting import until

from scheduler_svc.lane import multi_step
from scheduler_svc.lane.steady.decoding import SteadyDecoding, _Step

NUM_TOKENS = 100


def worker_of() -> CheckingWorker:
    return CheckingWorker(1, num_blocks=1024, max_model_len=256)


@pytest.mark.parametrize("interval", [2, 5])
async def test_tokens_and_plans_are_joined(redis_url, sockets, any_arrival_rate, interval):
    worker = worker_of()
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        worker.gate.clear()
        for tag in range(4):
            await gateway.submit(
                prompt(9, tag), max_tokens=NUM_TOKENS + tag, seed=tag, stream_interval=interval
            )
        await until(lambda: len(stack.engine.live) == 4, "all requests")
        worker.gate.set()
        assert all(received.is_whole for received in await gateway.wait_ended())
        # Each first token, each end, and what was buffered in between.
        assert gateway.num_token_frames <= 4 + 4 + NUM_TOKENS // interval + 1
        assert max(rounds_of(worker)) == interval
        # Nothing is computed after a last token.
        assert worker.num_sampled_tokens == sum(NUM_TOKENS + tag for tag in range(4))
        await worker.check()


async def test_the_smallest_interval_bounds_the_rounds(redis_url, sockets, any_arrival_rate):
    worker = worker_of()
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        worker.gate.clear()
        for tag, interval in enumerate((2, 31)):
            await gateway.submit(
                prompt(9, tag), max_tokens=NUM_TOKENS, seed=tag, stream_interval=interval
            )
        await until(lambda: len(stack.engine.live) == 2, "both requests")
        worker.gate.set()
        assert all(received.is_whole for received in await gateway.wait_ended())
        beside = [
            max(plan.schedule.num_rounds, default=1)
            for plan in worker.plans
            if len(plan.schedule.rows) == 2
        ]
        assert max(beside) == 2


async def test_a_resumed_stream_has_the_interval_of_its_attachment(redis_url, sockets):
    worker = worker_of()
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        first, other = await stack.gateway(), await stack.gateway()
        original = first.received[await first.submit(prompt(9), max_tokens=200, stream_interval=8)]
        await until(lambda: original.next_indices[0] > 0, "the first token")
        worker.gate.clear()
        attachment = await other.attach(original, 1)
        await until(lambda: original.failure is not None, "the first stream's end")
        frames = other.num_token_frames
        worker.gate.set()
        [received] = await other.wait_ended(attachment)
        assert received.is_whole
        # One per step, though some steps are delivered together.
        assert other.num_token_frames - frames > 200 // 8 + 2


async def test_a_lane_is_steady_while_no_plan_may_have_several_rounds(
    redis_url, sockets, monkeypatch
):
    """It is not soon after an arrival, nor while a request waits for a row."""
    monkeypatch.setattr(multi_step, "_SHARE", 0)
    num_steady = 0
    worker = CheckingWorker(1, num_blocks=1024, max_model_len=256, max_num_seqs=3)
    send = SteadyDecoding._send

    def counted(decoding: SteadyDecoding, step: _Step) -> None:
        nonlocal num_steady
        num_steady += 1
        if num_steady == 30:
            monkeypatch.setattr(multi_step, "_SHARE", 1000)
        send(decoding, step)

    monkeypatch.setattr(SteadyDecoding, "_send", counted)
    async with running_stack(redis_url, sockets, {"a": worker}, check_every_step=False) as stack:
        gateway = await stack.gateway()
        worker.gate.clear()
        for tag in range(3):
            await gateway.submit(prompt(9, tag), max_tokens=100, seed=tag, stream_interval=4)
        await until(lambda: len(stack.engine.live) == 3, "three requests")
        worker.gate.set()
        await check_outputs(gateway)
        rounds = rounds_of(worker)
        assert set(rounds[:30]) == {1}
        assert max(rounds) == 4
        # The step in progress when several rounds became possible is the last one.
        assert num_steady <= 31
        worker.gate.clear()
        for tag in range(4):
            await gateway.submit(prompt(9, tag), max_tokens=100, seed=9 + tag, stream_interval=4)
        await until(lambda: len(stack.engine.waiting) == 1, "one in the queue")
        worker.gate.set()
        await check_outputs(gateway)
        assert num_steady > 80
        assert max(rounds_of(worker)[len(rounds) :]) == 4
        await worker.check()
