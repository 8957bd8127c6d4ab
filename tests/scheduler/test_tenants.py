"""Tenants on a whole scheduler: fairness between them, their limits, and their own request ids."""

import asyncio

import pytest
from checking_worker import CheckingWorker
from google.rpc import error_details_pb2
from scheduler_stack import (
    NOT_FOUND,
    Gateway,
    Received,
    Stack,
    info_of,
    num_in_flight,
    prompt,
    running_stack,
)
from waiting import until

from quire.internal.v1 import scheduler_pb2
from quire.internal.v1.scheduler_pb2 import TenantPolicy
from scheduler_svc.core.fairness import INPUT_TOKEN_COST, OUTPUT_TOKEN_COST

RESOURCE_EXHAUSTED = 8
FLOOD = 300


async def submit(
    gateway: Gateway, principal: str, length: int = 9, max_tokens: int = 4, **fields: object
) -> Received:
    fields.setdefault("tenant", TenantPolicy(weight=1))
    attachment = await gateway.submit(
        prompt(length), max_tokens=max_tokens, principal=principal, **fields
    )
    return gateway.received[attachment]


async def refusal(received: Received) -> tuple[int, str]:
    """The code and the reason of a refused request."""
    await until(lambda: received.failure is not None, "a refusal")
    assert received.failure is not None
    return received.failure.code, info_of(received.failure).reason


def retry_s(received: Received) -> float | None:
    retry = error_details_pb2.RetryInfo()
    assert received.failure is not None
    found = any(detail.Unpack(retry) for detail in received.failure.details)
    return retry.retry_delay.ToNanoseconds() / 1e9 if found else None


def admitted_seeds(worker: CheckingWorker) -> list[int]:
    """Seeds of all admitted sequences, in order."""
    return [seed for plan in worker.plans for seed in plan.admissions.seeds]


async def flooded(stack: Stack, worker: CheckingWorker, num_tokens: int) -> tuple[Gateway, int]:
    """Hold a worker back in a flood of one tenant; the number of sequences that it admitted."""
    gateway = await stack.gateway()
    flood = [
        await submit(gateway, "flood", 24, num_tokens, seed=seed) for seed in range(1, FLOOD + 1)
    ]
    await until(lambda: all(one.accepted for one in flood), "acceptance")
    await until(lambda: len(admitted_seeds(worker)) > 8, "a busy worker")
    worker.gate.clear()
    await until(lambda: worker.is_held_back, "a step that is held back")
    await until(lambda: num_in_flight(stack.only_lane) == 2, "plans in flight")
    return gateway, len(admitted_seeds(worker))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        # The lane has room for all of them beside the long prompt that it computes.
        {"long_prefill_token_threshold": 4, "max_long_partial_prefills": 1},
        {"scheduling_policy": "priority", "batch_policy": "prefill_first"},
    ],
    ids=["short", "long", "priority"],
)
async def test_a_flood_of_one_tenant_does_not_delay_another(redis_url, sockets, settings):
    worker = CheckingWorker(1, num_blocks=1024, max_num_seqs=8)
    async with running_stack(
        redis_url, sockets, {"a": worker}, check_every_step=False, **settings
    ) as stack:
        gateway, num_before = await flooded(stack, worker, num_tokens=8)
        late = await submit(gateway, "late", 24, 8, seed=10_000)
        await until(lambda: late.accepted, "acceptance")
        worker.gate.set()
        await until(lambda: late.is_ended, "the end of the late request")
        position = admitted_seeds(worker).index(10_000) - num_before
        # The second plan in flight has up to eight; one of the flood is next, then the late one.
        assert position <= 8 + 1
        assert late.is_whole
        for attachment in gateway.received:
            await gateway.cancel(attachment)
        await until(lambda: not stack.engine.live, "the end of all")


@pytest.mark.slow
async def test_a_flood_on_all_workers_does_not_delay_another_tenant(redis_url, sockets):
    workers = {
        name: CheckingWorker(incarnation, num_blocks=1024, max_num_seqs=8)
        for incarnation, name in enumerate("ab", start=1)
    }
    async with running_stack(redis_url, sockets, workers, check_every_step=False) as stack:
        gateway = await stack.gateway()
        flood = [await submit(gateway, "flood", 24, 8, seed=seed) for seed in range(1, FLOOD + 1)]
        await until(lambda: all(one.accepted for one in flood), "acceptance")
        await until(lambda: all(map(admitted_seeds, workers.values())), "busy workers")
        late = await submit(gateway, "late", 24, 8, seed=10_000)
        await until(lambda: late.accepted, "acceptance")
        num_before = sum(len(admitted_seeds(worker)) for worker in workers.values())
        await until(lambda: late.is_ended, "the end of the late request")
        num_admitted = sum(len(admitted_seeds(worker)) for worker in workers.values()) - num_before
        # Twice the rows of both workers, with some margin; in order of arrival it would be most.
        assert num_admitted <= 60
        assert late.is_whole
        for attachment in gateway.received:
            await gateway.cancel(attachment)
        await until(lambda: not stack.engine.live, "the end of all")


async def test_a_lost_worker_and_a_cancelled_request_leave_no_charge_of_what_did_not_run(
    redis_url, sockets
):
    worker = CheckingWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}, pipeline_depth=1) as stack:
        gateway, shares = await stack.gateway(), stack.engine.shares
        worker.gate.clear()
        running = await submit(gateway, "t", 9, 4)
        await until(lambda: worker.is_held_back, "a step that is held back")
        assigned = [await submit(gateway, "t", 16, 4) for _ in range(2)]
        await until(lambda: len(stack.only_lane.assigned) == 2, "assigned sequences")
        charge = INPUT_TOKEN_COST * 9
        assert shares.of("t").counter == charge + 2 * INPUT_TOKEN_COST * 16
        await gateway.cancel(assigned[0].submission.attachment)
        await stack.stop_worker("a")
        await until(lambda: not stack.engine.lanes, "the lane's end")
        await until(lambda: assigned[0].is_ended, "the cancellation")
        assert shares.of("t").counter == charge
        await stack.start_worker("a", CheckingWorker(2))
        await until(lambda: running.is_ended and assigned[1].is_ended, "both ends")
        assert shares.of("t").counter == charge + INPUT_TOKEN_COST * 16


async def test_assigned_sequences_return_for_the_first_request_of_another_tenant(
    redis_url, sockets
):
    worker = CheckingWorker(1, num_blocks=1024, max_num_seqs=8, max_num_batched_tokens=16)
    settings = {"long_prefill_token_threshold": 4, "max_long_partial_prefills": 1}
    async with running_stack(redis_url, sockets, {"a": worker}, **settings) as stack:
        gateway = await stack.gateway()
        worker.gate.clear()
        first = await submit(gateway, "flood", 40)
        await until(lambda: worker.is_held_back, "a step that is held back")
        others = [await submit(gateway, "flood", 40) for _ in range(7)]
        await until(lambda: len(stack.only_lane.assigned) == 7, "assigned sequences")
        late = await submit(gateway, "late", 40, seed=10_000)
        await until(lambda: late.accepted, "acceptance")
        await until(lambda: len(stack.only_lane.assigned) == 7, "assigned sequences")
        # The lane has rows for eight.
        principals = [one.group.key.principal for one in stack.only_lane.assigned]
        assert principals.index("late") <= 1
        assert len(stack.engine.waiting) == 1
        worker.gate.set()
        await gateway.wait_ended()
        assert all(one.is_whole for one in (first, late, *others))


async def test_a_new_tenant_starts_at_what_a_running_one_was_served(redis_url, sockets):
    """Its output is charged by then, although nothing was queued meanwhile."""
    worker = CheckingWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway, shares = await stack.gateway(), stack.engine.shares
        worker.hold_after = 20
        running = await submit(gateway, "running", 9, 40)
        await until(lambda: len(running.token_ids) >= 15, "tokens")
        await until(lambda: worker.is_held_back, "a step that is held back")
        num_tokens = len(running.token_ids)
        late = await submit(gateway, "late", 9, 4)
        await until(lambda: bool(stack.only_lane.assigned), "its assignment")
        counter = INPUT_TOKEN_COST * 9 + OUTPUT_TOKEN_COST * num_tokens
        assert shares.of("running").counter >= counter
        assert shares.of("late").counter == shares.of("running").counter + INPUT_TOKEN_COST * 9
        worker.gate.set()
        await until(lambda: running.is_ended and late.is_ended, "both ends")


async def test_weights_share_the_service(redis_url, sockets):
    worker = CheckingWorker(1, num_blocks=1024, max_num_seqs=4)
    async with running_stack(redis_url, sockets, {"a": worker}, check_every_step=False) as stack:
        gateway = await stack.gateway()
        worker.gate.clear()
        owners: dict[int, str] = {}
        for number in range(200):
            name, weight = ("one", 1) if number % 2 else ("two", 2)
            owners[number + 1] = name
            tenant = TenantPolicy(weight=weight)
            await submit(gateway, name, 12, 4, seed=number + 1, tenant=tenant)
        await until(lambda: len(stack.engine.live) == 200, "all requests")
        worker.gate.set()
        await gateway.wait_ended()
        served = [owners[seed] for seed in admitted_seeds(worker)]
        # Until the heavier one has no more requests; the first were admitted before the rest came.
        assert 92 <= served[:150].count("two") <= 104


async def test_tenants_have_their_own_request_ids(redis_url, sockets):
    worker = CheckingWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        worker.gate.clear()
        ours = await submit(gateway, "ours", request_id="same", seed=1)
        theirs = await submit(gateway, "theirs", 12, request_id="same", seed=2)
        await until(lambda: ours.accepted and theirs.accepted, "both requests")
        foreign = scheduler_pb2.Submission()
        foreign.CopyFrom(ours.submission)
        foreign.principal = "third"
        attachment = await gateway.attach(Received(foreign, list(ours.choices)))
        assert await refusal(gateway.received[attachment]) == (NOT_FOUND, "UNKNOWN_REQUEST")
        for tag, principal in enumerate(("third", "theirs")):
            key = scheduler_pb2.RequestKey(principal=principal, request_id="same")
            await gateway.send(cancellations=[scheduler_pb2.Cancellation(request=key, tag=tag)])
        await until(lambda: len(gateway.cancelled) == 2, "both results")
        assert gateway.cancelled == {0: False, 1: True}
        worker.gate.set()
        await until(lambda: ours.is_ended, "the other one's end")
        assert ours.is_whole


async def test_salts_of_tenants_separate_cached_prefixes(redis_url, sockets):
    async with running_stack(redis_url, sockets, {"a": CheckingWorker(1)}) as stack:
        gateway = await stack.gateway()
        cached = []
        for principal in ("a", "b", "a"):
            one = await submit(
                gateway, principal, 21, cache_salt=b"\xff%b\xff" % principal.encode()
            )
            await until(lambda one=one: one.is_ended, "an end")
            assert one.end is not None
            cached.append(one.end.num_cached_prompt_tokens)
        assert cached == [0, 0, 20]


async def test_live_requests_are_limited_over_all_gateways(redis_url, sockets):
    worker = CheckingWorker(1)
    tenant = TenantPolicy(weight=1, live_requests=2)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway, other = await stack.gateway(), await stack.gateway()
        worker.gate.clear()
        first = await submit(gateway, "t", request_id="1", tenant=tenant)
        second = await submit(other, "t", request_id="2", tenant=tenant)
        await until(lambda: first.accepted and second.accepted, "both requests")
        third = await submit(other, "t", request_id="3", tenant=tenant)
        assert await refusal(third) == (RESOURCE_EXHAUSTED, "LIVE_REQUESTS")
        assert retry_s(third) == 1
        # Neither an attachment nor a resubmission is a new request.
        attached = other.received[await other.attach(first)]
        again = gateway.received[await gateway.submit_again(second)]
        await until(lambda: attached.accepted and again.accepted, "both attachments")
        assert (await submit(other, "else", request_id="3", tenant=tenant)).failure is None
        worker.gate.set()
        await until(lambda: not stack.engine.live, "all ends")
        fourth = await submit(other, "t", request_id="4", tenant=tenant)
        await until(lambda: fourth.is_ended, "another request")
        assert fourth.is_whole


async def test_rates_are_limited_with_a_time_to_retry(redis_url, sockets):
    tenant = TenantPolicy(weight=1, requests_per_minute=2)
    async with running_stack(redis_url, sockets, {"a": CheckingWorker(1)}) as stack:
        gateway = await stack.gateway()
        first = await submit(gateway, "t", request_id="1", tenant=tenant)
        await until(lambda: first.is_ended, "its end")
        # A request of the same id has finished: it is sent again, and not counted again.
        for _ in range(2):
            again = await submit(gateway, "t", request_id="1", tenant=tenant)
            await until(lambda again=again: again.is_ended, "its end")
            assert again.is_whole
        second = await submit(gateway, "t", request_id="2", tenant=tenant)
        third = await submit(gateway, "t", request_id="3", tenant=tenant)
        assert await refusal(third) == (RESOURCE_EXHAUSTED, "REQUESTS_PER_MINUTE")
        assert 0 < retry_s(third) <= 30
        again = await submit(gateway, "t", request_id="1", tenant=tenant)
        await until(lambda: second.is_ended and again.is_ended, "the ends of both")
        assert again.is_whole


async def test_a_rate_of_zero_ends_no_leader(redis_url, sockets):
    tenant = TenantPolicy(weight=1, requests_per_minute=0, tokens_per_minute=0)
    async with running_stack(redis_url, sockets, {"a": CheckingWorker(1)}) as stack:
        gateway = await stack.gateway()
        first = await submit(gateway, "t", request_id="1", tenant=tenant)
        await until(lambda: first.is_ended, "its end")
        second = await submit(gateway, "t", request_id="2", tenant=tenant)
        assert await refusal(second) == (RESOURCE_EXHAUSTED, "REQUESTS_PER_MINUTE")
        other = await submit(gateway, "u", request_id="3")
        await until(lambda: other.is_ended, "its end")


async def test_output_is_taken_from_the_rate_of_tokens(redis_url, sockets):
    tenant = TenantPolicy(weight=1, tokens_per_minute=30)
    async with running_stack(redis_url, sockets, {"a": CheckingWorker(1)}) as stack:
        gateway = await stack.gateway()
        first = await submit(gateway, "t", 9, 20, request_id="1", tenant=tenant)
        await until(lambda: first.is_ended, "its end")
        second = await submit(gateway, "t", 9, 20, request_id="2", tenant=tenant)
        assert await refusal(second) == (RESOURCE_EXHAUSTED, "TOKENS_PER_MINUTE")
        assert 0 < retry_s(second) <= 16


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "drained"])
async def test_a_new_leader_counts_recovered_requests(redis_url, sockets, is_killed):
    worker = CheckingWorker(1)
    limits = {"live_requests": 2, "resumable_requests": 1, "requests_per_minute": 4}
    tenant = TenantPolicy(weight=1, **limits)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        one = await submit(gateway, "t", 9, 50, request_id="1", tenant=tenant, resume_window_s=60)
        other = await submit(gateway, "t", 9, 50, request_id="2", tenant=tenant)
        await until(lambda: min(len(r.token_ids) for r in (one, other)) > 2, "some tokens")
        worker.gate.clear()
        previous, successor = stack.member, stack.start_scheduler()
        await until(lambda: successor.is_standby, "a standby")
        asyncio.get_running_loop().call_later(0.2, worker.gate.set)
        if is_killed:
            await previous.kill()
            stack.expire_lease(previous)
        else:
            await previous.drain()
        gateway = await stack.gateway()
        worker.gate.clear()
        await gateway.submit_again(one)
        resumed = gateway.received[await gateway.submit_again(other)]
        await until(lambda: resumed.accepted, "the resubmission")
        # Neither of them was refused or counted twice, and no third one is accepted.
        third = await submit(gateway, "t", request_id="3", tenant=tenant)
        assert await refusal(third) == (RESOURCE_EXHAUSTED, "LIVE_REQUESTS")
        await gateway.cancel(resumed.submission.attachment)
        worker.gate.set()
        await until(lambda: len(stack.engine.live) == 1, "an end")
        fourth = await submit(gateway, "t", request_id="4", tenant=tenant, resume_window_s=60)
        assert await refusal(fourth) == (RESOURCE_EXHAUSTED, "RESUMABLE_REQUESTS")
        await until(lambda: not stack.engine.live, "the other end")
