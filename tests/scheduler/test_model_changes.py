"""Workers with another model: its tokens never follow those of the former one."""

import pytest
import redis
from beam_requests import beam_worker, submit_search
from checking_worker import CheckingWorker
from scheduler_stack import UNAVAILABLE, Gateway, Received, Stack, info_of, prompt, running_stack
from waiting import until

from quire.internal.v1 import worker_pb2
from scheduler_svc.store.keys import ShardKeys

KEYS = ShardKeys(0)
OTHER = {"fingerprint": b"other model", "num_blocks": 128}


async def with_output(stack: Stack) -> Received:
    """A request with some tokens, whose client is away."""
    gateway = await stack.gateway()
    received = gateway.received[
        await gateway.submit(prompt(9), max_tokens=50, resume_window_s=60, request_id="begun")
    ]
    await until(lambda: len(received.token_ids) >= 3, "some tokens")
    return received


def model_in(client: redis.Redis) -> bytes | None:
    return client.hget(KEYS.leadership, "model")


async def check_refused(gateway: Gateway, received: Received) -> None:
    [again] = await gateway.wait_ended(await gateway.submit_again(received))
    assert again.failure is not None
    assert again.failure.code == UNAVAILABLE
    assert info_of(again.failure).reason == "MODEL_CHANGED"


async def test_a_new_leader_with_another_model_ends_requests_with_output(redis_url, sockets):
    """All services are restarted with another model, and Redis is not."""
    worker = CheckingWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        begun = await with_output(stack)
        worker.gate.clear()
        await stack.member.kill()
        await stack.stop_worker("a")
        stack.expire_lease()
        stack.start_scheduler()
        gateway = await stack.gateway()
        late = await gateway.submit(prompt(7), max_tokens=5, request_id="late")
        await stack.start_worker("a", CheckingWorker(2, **OTHER))
        await check_refused(gateway, begun)
        [served] = await gateway.wait_ended(late)
        assert served.is_whole


async def test_another_model_computes_all_log_probabilities_of_a_prompt(redis_url, sockets):
    """Those of the former model, of the part of the prompt that it had computed, are forgotten."""
    first, num_results = CheckingWorker(1), 0

    def distort(result: worker_pb2.StepResult) -> None:
        nonlocal num_results
        num_results += 1
        found = result.prompt_logprobs
        found.logprobs = bytes(len(found.logprobs))
        if num_results == 2:
            first.gate.clear()

    first.distort = distort
    async with running_stack(
        redis_url, sockets, {"a": first}, max_num_batched_tokens=8, pipeline_depth=1
    ) as stack:
        gateway = await stack.gateway()
        attachment = await gateway.submit(prompt(41), num_prompt_logprobs=1)
        await until(lambda: stack.engine.live, "the request")
        [group] = stack.engine.live.values()
        await until(lambda: group.sequences[0].prompt_logprobs, "a part of the log-probabilities")
        await stack.stop_worker("a")
        await stack.start_worker("a", CheckingWorker(2, **OTHER))
        [received] = await gateway.wait_ended(attachment)
        assert received.is_whole


async def test_choices_of_a_request_have_one_model(redis_url, sockets):
    """One that has no output yet does not run with another model than one that has ended."""
    first = CheckingWorker(1, max_num_seqs=1)
    first.hold_after = 5
    async with running_stack(redis_url, sockets, {"a": first}) as stack:
        gateway = await stack.gateway()
        received = gateway.received[await gateway.submit(prompt(9), max_tokens=5, n=2)]
        await until(lambda: received.end, "the end of the first choice")
        await stack.stop_worker("a")
        await stack.start_worker("a", CheckingWorker(2, max_num_seqs=1, **OTHER))
        await until(lambda: received.is_ended, "the end")
        assert received.failure is not None
        assert info_of(received.failure).reason == "MODEL_CHANGED"


async def test_requests_continue_with_another_block_size_of_the_same_model(redis_url, sockets):
    first = CheckingWorker(1)
    async with running_stack(redis_url, sockets, {"a": first}) as stack:
        gateway = await stack.gateway()
        first.hold_after = 6
        begun = gateway.received[await gateway.submit(prompt(13), max_tokens=40, n=2)]
        await gateway.submit(prompt(41, 2), seed=2, num_prompt_logprobs=1)
        await until(lambda: first.is_held_back and begun.choices[1].token_ids, "some tokens")
        await stack.stop_worker("a")
        await stack.start_worker("a", CheckingWorker(2, block_size=8))
        assert all(received.is_whole for received in await gateway.wait_ended())
        # The hashes are those of blocks of this size.
        [other] = await gateway.wait_ended(await gateway.submit(prompt(23), max_tokens=1))
        assert other.end.num_cached_prompt_tokens == 8
        await stack.workers["a"][0].check()


@pytest.mark.parametrize("is_other", [False, True])
async def test_a_request_that_was_withdrawn_meanwhile_follows_a_change_of_the_workers(
    redis_url, sockets, is_other: bool
):
    """As one that another shard may have got, and has not."""
    first = CheckingWorker(1)
    async with running_stack(redis_url, sockets, {"a": first}) as stack:
        await with_output(stack)
        engine, model = stack.engine, stack.engine.output_model
        await stack.stop_worker("a")
        await until(lambda: not engine.lanes, "no lane")
        [group] = engine.live.values()
        engine.withdraw(group)
        changed = OTHER if is_other else {"block_size": 2}
        await stack.start_worker("a", CheckingWorker(2, **changed))
        await until(lambda: engine.lanes, "a lane")
        engine.return_withdrawn(group, model)
        [gateway] = stack.gateways
        [received] = await gateway.wait_ended()
        if is_other:
            assert info_of(received.failure).reason == "MODEL_CHANGED"
        else:
            assert received.is_whole
        await stack.workers["a"][0].check()


async def test_the_model_is_stored_after_the_requests_of_the_last_one_have_ended(
    redis_url, redis_client, sockets, monkeypatch
):
    """Else a leader that ends in between would leave them to its successor."""
    first = CheckingWorker(1)
    async with running_stack(redis_url, sockets, {"a": first}) as stack:
        begun = await with_output(stack)
        assert model_in(redis_client) == b"model"
        first.gate.clear()
        await stack.stop_worker("a")
        await stack.start_worker("a", CheckingWorker(2, **OTHER))
        await until(lambda: model_in(redis_client) == b"other model", "the new model")
        record, _ = KEYS.request("", "begun")
        assert redis_client.hget(record, "state") == b"failed"
        await check_refused(await stack.gateway(), begun)


async def test_the_model_is_stored_again_after_redis_has_lost_it(redis_url, redis_client, sockets):
    async with running_stack(redis_url, sockets, {"a": CheckingWorker(1)}) as stack:
        begun = await with_output(stack)
        redis_client.flushall()
        await until(lambda: model_in(redis_client) == b"model", "the model")
        gateway = await stack.gateway()
        [again] = await gateway.wait_ended(await gateway.submit_again(begun))
        assert again.is_whole


async def test_a_search_is_as_long_as_the_new_model_allows(redis_url, sockets):
    held = beam_worker(1, max_model_len=32)
    held.gate.clear()
    async with running_stack(redis_url, sockets, {"a": held}) as stack:
        gateway = await stack.gateway()
        search = await submit_search(gateway, prompt(9), max_tokens=40)
        await until(lambda: held.is_held_back, "the first step")
        await stack.stop_worker("a")
        longer = CheckingWorker(2, max_model_len=64, token_logprobs=True, **OTHER)
        await stack.start_worker("a", longer)
        [received] = await gateway.wait_ended(search)
        assert received.is_whole
