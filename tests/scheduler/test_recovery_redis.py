"""A Redis that restarts without its last writes."""

import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from checking_worker import CheckingWorker
from scheduler_stack import NOT_FOUND, Gateway, Received, Stack, info_of, prompt, running_stack
from waiting import until

from quire.launcher.redis import EmbeddedRedis
from scheduler_svc.store.keys import ShardKeys


class ForgetfulRedis(EmbeddedRedis):
    """Keeps a file, and can be restarted without its last writes."""

    @property
    def _file(self) -> Path:
        """The append-only file."""
        return max(self.directory.rglob("*.aof"), key=lambda path: path.stat().st_mtime_ns)

    @property
    def num_bytes(self) -> int:
        """Size of the file, which has every acknowledged write."""
        return self._file.stat().st_size

    def forget(self, num_bytes: int) -> None:
        """Kill the server and restart it with the first `num_bytes` of the file."""
        self.kill()
        self.wait(5)
        os.truncate(self._file, num_bytes)
        self.start()


@pytest.fixture
def server() -> Iterator[ForgetfulRedis]:
    directory = tempfile.TemporaryDirectory(prefix="quire-")
    with directory as path, ForgetfulRedis(Path(path), appendonly=True) as server:
        yield server


async def has_more_tokens(received: Received, count: int) -> None:
    target = len(received.token_ids) + count
    await until(lambda: len(received.token_ids) >= target, f"{count} tokens more")


async def submitted(gateway: Gateway, tag: int, **overrides: object) -> Received:
    fields = {
        "max_tokens": 50,
        "seed": tag,
        "request_id": f"r{tag}",
        "num_logprobs": tag,
        **overrides,
    }
    received = gateway.received[await gateway.submit(prompt(9, tag), **fields)]
    await has_more_tokens(received, 3)
    return received


async def comes_back(stack: Stack, gateway: Gateway) -> Gateway:
    """A new stream, when the old one has ended."""
    await until(lambda: gateway.lost is not None, "the end of the stream")
    again = await stack.gateway()
    assert again.epoch > gateway.epoch
    return again


async def all_are_whole(stack: Stack, gateway: Gateway, worker: CheckingWorker) -> None:
    assert all(received.is_whole for received in await gateway.wait_ended())
    await until(lambda: not stack.engine.live, "the end of all")
    await until(lambda: stack.only_lane.is_empty, "an empty lane")
    await stack.only_lane.check_integrity()
    await worker.check()


async def test_the_leader_restores_a_redis_that_is_rolled_back_behind_the_worker(server, sockets):
    worker = CheckingWorker(1)
    async with running_stack(server.url, sockets, {"a": worker}, lease_s=0.6) as stack:
        gateway = await stack.gateway()
        early = await submitted(gateway, 1)
        num_bytes = server.num_bytes
        await has_more_tokens(early, 8)
        # Redis will not have these.
        late = await submitted(gateway, 2, n=2)
        ended = await submitted(gateway, 3, max_tokens=4)
        await until(lambda: ended.is_ended, "an end")
        worker.gate.clear()
        server.forget(num_bytes)
        again = await comes_back(stack, gateway)
        await again.attach(late, *late.next_indices)
        await again.submit_again(early)
        worker.gate.set()
        await all_are_whole(stack, again, worker)
        # A request whose end Redis has lost starts again if it is submitted in full.
        ended.is_redelivered = True
        await again.submit_again(ended)
        await all_are_whole(stack, again, worker)


async def test_the_leader_restores_a_redis_that_loses_all_during_a_hand_over(server, sockets):
    """Without its pool the lane ends; the last write of the term finds the loss."""
    worker = CheckingWorker(1)
    # The lease is not renewed meanwhile.
    async with running_stack(server.url, sockets, {"a": worker}, lease_s=60) as stack:
        gateway = await stack.gateway()
        received = await submitted(gateway, 1)
        worker.gate.clear()
        await until(lambda: worker.is_held_back, "a step in flight")
        discovery = stack.member.term._discovery
        stack.scheduler.shards[0]._must_end.set()
        await until(lambda: discovery._halting, "the hand-over")
        with redis.Redis.from_url(server.url) as client:
            client.flushall()
        worker.gate.set()
        again = await comes_back(stack, gateway)
        await again.attach_again(received)
        await all_are_whole(stack, again, worker)


async def test_leader_and_redis_s_last_second_are_lost_together(server, sockets):
    worker = CheckingWorker(1)
    async with running_stack(server.url, sockets, {"a": worker}, lease_s=0.6) as stack:
        gateway = await stack.gateway()
        early = await submitted(gateway, 1)
        num_bytes = server.num_bytes
        await has_more_tokens(early, 8)
        late, lost = await submitted(gateway, 2, n=2), await submitted(gateway, 3)
        worker.gate.clear()
        await stack.member.kill()
        server.forget(num_bytes)
        stack.start_scheduler()
        stack.expire_lease()
        worker.gate.set()
        again = await stack.gateway()
        # Redis lost all of it, and no other copy exists.
        [unknown] = await again.wait_ended(await again.attach(lost))
        assert unknown.failure.code == NOT_FOUND
        assert info_of(unknown.failure).metadata["resumable"] == "false"
        again.received = {k: h for k, h in again.received.items() if h is not unknown}
        # Tokens that clients have already are sampled again but not sent.
        early.is_redelivered = late.is_redelivered = True
        num_sampled = worker.num_sampled_tokens
        for received in (early, late):
            await again.submit_again(received)
        num_received = len(early.token_ids)
        await all_are_whole(stack, again, worker)
        assert worker.num_sampled_tokens - num_sampled > 50 - num_received


async def test_an_epoch_is_lost_with_redis_s_last_second(server, sockets):
    worker = CheckingWorker(1)
    async with running_stack(server.url, sockets, {"a": worker}, lease_s=0.6) as stack:
        first = await stack.gateway()
        received = await submitted(first, 1)
        num_bytes = server.num_bytes
        await stack.member.kill()
        stack.start_scheduler()
        stack.expire_lease()
        second = await stack.gateway()
        received = second.received[await second.submit_again(received)]
        await has_more_tokens(received, 3)
        worker.gate.clear()
        # Redis has the lease of the first leader again.
        server.forget(num_bytes)
        third = await comes_back(stack, second)
        worker.gate.set()
        await third.submit_again(received)
        await all_are_whole(stack, third, worker)
        epochs = [plan.epoch for plan in worker.plans]
        assert epochs == sorted(epochs)
        assert list(dict.fromkeys(epochs)) == [first.epoch, second.epoch, third.epoch]


async def test_a_leader_at_a_primary_that_was_replaced_finds_the_new_one(
    server, redis_server, redis_url, sockets
):
    """Cut off from its replicas and Sentinels, the old one takes writes as before."""
    worker, primary = CheckingWorker(1), sockets / "primary.sock"
    primary.symlink_to(server.socket_path)
    async with running_stack(f"unix://{primary}", sockets, {"a": worker}, lease_s=0.6) as stack:
        old = await stack.gateway()
        received = await submitted(old, 1)
        previous = stack.member
        primary.unlink()
        primary.symlink_to(redis_server.socket_path)
        stack.start_scheduler()
        new = await stack.gateway()
        await until(lambda: old.lost is not None, "the end of the old stream")
        await until(lambda: previous.is_standby, "a standby")
        # The new one has none of it.
        received.is_redelivered = True
        await new.submit_again(received)
        await all_are_whole(stack, new, worker)


@pytest.mark.parametrize("command", ["scan", "script", "time", "info"])
async def test_a_command_that_its_user_may_not_run_is_reported_until_it_may(
    server, sockets, command
):
    """The scheduler does not end, and is not healthy though Redis responds."""
    with redis.Redis.from_url(server.url) as client:
        rules = ("on", ">p", "~quire:*", "+@all", f"-{command}")
        client.execute_command("ACL", "SETUSER", "few", *rules)
        # Each of its scripts is unknown to it.
        client.script_flush()
        url = server.url.replace("unix://", "unix://few:p@")
        stack = Stack(url, sockets, {"workers": f"unix:{sockets}/a.sock"})
        scheduler = stack.start_scheduler().scheduler
        try:
            await stack.start_worker("a", CheckingWorker(1))
            health = scheduler._health
            reason = re.compile("no permissions|can't run this command")
            await until(lambda: reason.search(health.failing.get("redis", "")), "the reason")
            assert not stack.serving.done()
            client.execute_command("ACL", "SETUSER", "few", f"+{command}")
            await until(lambda: not health.failing, "a healthy scheduler")
            gateway = await stack.gateway()
            [received] = await gateway.wait_ended(await gateway.submit(prompt(9)))
            assert received.is_whole
        finally:
            await stack.stop()


@pytest.mark.slow
async def test_a_pool_of_which_redis_has_evicted_a_key_begins_anew(server, sockets):
    worker = CheckingWorker(1)
    keys = ShardKeys(0).pool(1)
    async with running_stack(server.url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        await gateway.wait_ended(await gateway.submit(prompt(9)))
        with redis.Redis.from_url(server.url) as client:
            for tag, key in enumerate(keys.blocks):
                lane = stack.engine.lanes[1]
                client.delete(key)
                received = gateway.received[await gateway.submit(prompt(9, tag + 1), max_tokens=20)]
                await until(lambda lane=lane: stack.engine.lanes.get(1) not in (None, lane), key)
                await until(lambda one=received: one.is_ended, "the end of its request")
        await all_are_whole(stack, gateway, worker)
        await until(lambda: stack.engine.lanes[1].is_empty, "an empty lane")
        assert stack.engine.lanes[1].num_free_blocks == worker.hello.num_blocks - 1
        await stack.engine.lanes[1].check_integrity()


async def test_the_documented_rights_suffice(server, sockets):
    page = (Path(__file__).parents[2] / "docs/reliability.md").read_text(encoding="utf-8")
    [rule] = [line for line in page.splitlines() if line.startswith("ACL SETUSER quire ")]
    worker = CheckingWorker(1)
    with redis.Redis.from_url(server.url) as client:
        client.execute_command(*rule.split())
    # Another database needs a right of its own.
    url = server.url.replace("unix://", "unix://quire:PASSWORD@") + "?db=1"
    async with running_stack(url, sockets, {"a": worker}) as stack:
        received = await submitted(await stack.gateway(), 1)
        previous, successor = stack.member, stack.start_scheduler()
        await until(lambda: successor.is_standby, "a standby")
        await previous.drain()
        gateway = await stack.gateway()
        await gateway.submit_again(received)
        await all_are_whole(stack, gateway, worker)
