"""A change of leader forgets neither what tenants have used of their rates nor whom it served."""

import pytest
import redis
from checking_worker import CheckingWorker
from scheduler_stack import Received, Stack, info_of, prompt, running_stack
from waiting import until

from quire.internal.v1.scheduler_pb2 import TenantPolicy
from scheduler_svc.core.tenants import TenantsState
from scheduler_svc.engine import tenant_writer
from scheduler_svc.engine.tenant_writer import from_json
from scheduler_svc.store.keys import ShardKeys

KEYS = ShardKeys(0)

LIMITED = TenantPolicy(weight=2, requests_per_minute=2)


@pytest.fixture(autouse=True)
def frequent_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_writer, "WRITE_INTERVAL_S", 0.02)


async def serve(stack: Stack, principal: str, request_id: str, **fields: object) -> Received:
    """Submit a short request, and wait for its end or its refusal."""
    gateway = await stack.gateway()
    attachment = await gateway.submit(
        prompt(9), max_tokens=4, principal=principal, request_id=request_id, **fields
    )
    received = gateway.received[attachment]
    await until(lambda: received.is_ended or received.failure is not None, "an end")
    return received


async def use_up(stack: Stack) -> None:
    """Let one tenant use up its rate, and another one be served."""
    for request_id in ("1", "2"):
        assert (await serve(stack, "t", request_id, tenant=LIMITED)).is_whole
    assert (await serve(stack, "other", "1", tenant=TenantPolicy(weight=4))).is_whole
    assert stack.engine.shares.of("t").charged == (9 * 2 + 2 * 4 * 2) / 2


async def reason(stack: Stack) -> str:
    """The reason of the refusal of one more request."""
    received = await serve(stack, "t", "3", tenant=LIMITED)
    assert received.failure is not None
    return info_of(received.failure).reason


def stored(client: redis.Redis) -> TenantsState:
    state = client.hget(KEYS.tenants, "state")
    return from_json(state, 0.0) if state else TenantsState()


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "drained"])
async def test_a_new_leader_knows_rates_shares_and_weights(redis_url, sockets, is_killed):
    async with running_stack(redis_url, sockets, {"a": CheckingWorker(1)}) as stack:
        await use_up(stack)
        counter = stack.engine.shares.of("other").charged
        previous, successor = stack.member, stack.start_scheduler()
        await until(lambda: successor.is_standby, "a standby")
        if is_killed:
            with redis.Redis.from_url(redis_url) as client:
                shares = previous.engine.export_tenants().shares
                await until(lambda: stored(client).shares == shares, "the stored state")
            await previous.kill()
            stack.expire_lease(previous)
        else:
            await previous.drain()
        await until(lambda: stack.member.is_leading, "a leader")
        shares = stack.engine.shares
        assert shares.last_served == "other"
        assert shares.of("other").weight == 4
        assert shares.of("other").counter == counter
        assert await reason(stack) == "REQUESTS_PER_MINUTE"


async def test_a_leader_that_lost_redis_knows_its_tenants(redis_url, sockets):
    async with running_stack(redis_url, sockets, {"a": CheckingWorker(1)}) as stack:
        await use_up(stack)
        engine = stack.engine
        with redis.Redis.from_url(redis_url) as client:
            client.flushall()
            await until(
                lambda: stack.member.is_leading and stack.engine is not engine, "another term"
            )
            await until(lambda: client.exists(KEYS.tenants), "the state, stored again")
        await until(lambda: bool(stack.engine.lanes), "a worker")
        assert await reason(stack) == "REQUESTS_PER_MINUTE"


async def test_a_new_leader_starts_anew_if_the_state_is_lost_or_malformed(redis_url, sockets):
    async with running_stack(redis_url, sockets, {"a": CheckingWorker(1)}) as stack:
        await use_up(stack)
        previous, successor = stack.member, stack.start_scheduler()
        await until(lambda: successor.is_standby, "a standby")
        await previous.kill()
        with redis.Redis.from_url(redis_url) as client:
            client.hset(KEYS.tenants, "state", "{")
        stack.expire_lease()
        assert (await serve(stack, "t", "3", tenant=LIMITED)).is_whole


async def test_nothing_is_stored_without_keys(redis_url, sockets):
    async with running_stack(redis_url, sockets, {"a": CheckingWorker(1)}) as stack:
        assert (await serve(stack, "", "1")).is_whole
        await stack.member.drain()
        with redis.Redis.from_url(redis_url) as client:
            assert not client.exists(KEYS.tenants)
