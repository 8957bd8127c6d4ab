"""A lane whose rows only decode: its steps pass the loop by."""

from collections.abc import Callable

import pytest
import redis
from checking_worker import CheckingWorker
from grpc import StatusCode
from scheduler_stack import Gateway, Stack, check_outputs, num_in_flight, prompt, running_stack
from waiting import until

from quire.service.errors import failed
from scheduler_svc.lane.steady.decoding import SteadyDecoding, _Step
from scheduler_svc.store.decode_commits import DecodeCommits

NUM_TOKENS = 120


@pytest.fixture
def steady_steps(monkeypatch) -> list[int]:
    """The numbers of the steps that the loop did not make."""
    steps: list[int] = []
    send = SteadyDecoding._send

    def recorded(steady: SteadyDecoding, step: _Step) -> None:
        steps.append(step.number)
        send(steady, step)

    monkeypatch.setattr(SteadyDecoding, "_send", recorded)
    return steps


def at_commit(monkeypatch, number: int, act: Callable[[], object]) -> None:
    """Act right after the `number`th commit is begun, before its reply."""
    begin, begun = DecodeCommits.begin, []

    def acting(commits: DecodeCommits, *args: object) -> bool:
        is_sent = begin(commits, *args)  # type: ignore[arg-type]
        begun.append(args[0])
        if len(begun) == number:
            act()
        return is_sent

    monkeypatch.setattr(DecodeCommits, "begin", acting)


def worker_of(num_blocks: int = 60) -> CheckingWorker:
    return CheckingWorker(
        incarnation=1,
        num_blocks=num_blocks,
        block_size=16,
        max_model_len=160,
        max_num_seqs=8,
        max_num_batched_tokens=1024,
    )


async def decoding(stack: Stack, count: int = 3, **fields: object) -> Gateway:
    """Requests of different lengths that end one after another."""
    gateway = await stack.gateway()
    for tag in range(count):
        await gateway.submit(
            prompt(5 + 7 * tag, tag + 1), max_tokens=NUM_TOKENS - 20 * tag, seed=tag, **fields
        )
    return gateway


async def check_pool(stack: Stack) -> None:
    """Blocks are free, and counted as they are."""
    lane = stack.only_lane
    await until(lambda: lane.is_empty and not num_in_flight(lane), "an idle lane")
    await lane.check_integrity()


@pytest.mark.parametrize("pipeline_depth", [1, 2, 3])
async def test_most_steps_are_steady(redis_url, sockets, steady_steps, pipeline_depth) -> None:
    worker = worker_of()
    settings = {"check_every_step": False, "pipeline_depth": pipeline_depth}
    async with running_stack(redis_url, sockets, {"a": worker}, **settings) as stack:
        gateway = await decoding(stack)
        await check_outputs(gateway)
        await check_pool(stack)
        await worker.check()
        assert len(steady_steps) > NUM_TOKENS / 2


async def test_references_are_right_after_each_step(redis_url, sockets, steady_steps) -> None:
    worker = worker_of()
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await decoding(stack)
        await check_outputs(gateway)
        await worker.check()
        assert steady_steps


async def test_blocks_filled_in_steady_steps_are_cached(redis_url, sockets, steady_steps) -> None:
    worker = worker_of()
    async with running_stack(redis_url, sockets, {"a": worker}, check_every_step=False) as stack:
        gateway = await stack.gateway()
        first = await gateway.submit(prompt(9), max_tokens=100)
        [one] = await gateway.wait_ended(first)
        again = await gateway.submit([*prompt(9), *one.token_ids], max_tokens=2)
        [other] = await gateway.wait_ended(again)
        assert other.end is not None
        # The last token is sampled and not computed.
        assert other.end.num_cached_prompt_tokens == (9 + 99) // 16 * 16
        assert len(steady_steps) > 50


async def test_sequences_wait_for_blocks_as_ever(redis_url, sockets, steady_steps) -> None:
    worker = worker_of(num_blocks=14)
    settings = {"check_every_step": False, "watermark": 0}
    async with running_stack(redis_url, sockets, {"a": worker}, **settings) as stack:
        gateway = await decoding(stack)
        await check_outputs(gateway)
        await check_pool(stack)
        await worker.check()
        assert stack.only_lane.stats.num_preempted_by_recompute
        assert steady_steps


async def test_a_stop_token_ends_its_sequence(redis_url, sockets, steady_steps) -> None:
    worker = worker_of()
    async with running_stack(redis_url, sockets, {"a": worker}, check_every_step=False) as stack:
        gateway = await decoding(stack, 1)
        stop = gateway.received[1].tokens(70)[-1]
        await gateway.submit(prompt(5), max_tokens=110, seed=0, stop_token_ids=(stop,))
        await check_outputs(gateway)
        await check_pool(stack)
        assert len(gateway.received[2].token_ids) <= 70
        assert steady_steps


async def test_a_commit_is_repeated_when_redis_has_forgotten_the_script(
    redis_url, sockets, steady_steps, monkeypatch
) -> None:
    def forget() -> None:
        with redis.Redis.from_url(redis_url) as client:
            client.script_flush()

    at_commit(monkeypatch, 10, forget)
    worker = worker_of()
    async with running_stack(redis_url, sockets, {"a": worker}, check_every_step=False) as stack:
        gateway = await decoding(stack)
        await check_outputs(gateway)
        await check_pool(stack)
        await worker.check()
        assert len(steady_steps) > 20


async def test_a_commit_is_repeated_when_the_connection_breaks(
    redis_url, sockets, steady_steps, monkeypatch
) -> None:
    def disconnect() -> None:
        with redis.Redis.from_url(redis_url) as client:
            client.client_kill_filter(_type="normal", skipme=True)

    for number in (10, 11, 30):
        at_commit(monkeypatch, number, disconnect)
    worker = worker_of()
    async with running_stack(redis_url, sockets, {"a": worker}, check_every_step=False) as stack:
        gateway = await decoding(stack)
        await check_outputs(gateway)
        await check_pool(stack)
        await worker.check()
        assert len(steady_steps) > 20


async def test_a_request_that_ends_during_a_commit_gets_no_more_tokens(
    redis_url, sockets, steady_steps, monkeypatch
) -> None:
    worker = worker_of()
    async with running_stack(redis_url, sockets, {"a": worker}, check_every_step=False) as stack:
        counts: list[int] = []

        def cancel() -> None:
            group = next(iter(stack.engine.live.values()))
            counts.append(group.sequences[0].num_journaled)
            stack.engine.abort(group, failed(StatusCode.CANCELLED, "CANCELLED", "by the test"))

        at_commit(monkeypatch, 10, cancel)
        gateway = await decoding(stack)
        cancelled, *others = await gateway.wait_ended()
        assert cancelled.failure is not None
        assert [len(cancelled.token_ids)] == counts
        assert all(other.is_whole for other in others)
        await check_pool(stack)
        await worker.check()


async def test_an_error_of_a_callback_ends_the_scheduler(
    redis_url, sockets, steady_steps, monkeypatch
) -> None:
    class Fault(Exception):
        pass

    def fail() -> None:
        raise Fault

    at_commit(monkeypatch, 10, fail)
    stack = Stack(redis_url, sockets, {"workers": f"unix:{sockets}/a.sock"})
    member = stack.start_scheduler(check_every_step=False)
    await stack.start_worker("a", worker_of())
    await stack.ready()
    await decoding(stack)
    with pytest.raises(ExceptionGroup) as raised:
        await member.serving
    assert raised.value.subgroup(Fault)
    for gateway in stack.gateways:
        await gateway.close()
    await stack.stop_worker("a")
    await member.channel.close()
