"""A Redis that comes back without its last writes."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from ledger_worker import LedgerWorker
from scheduler_stack import NOT_FOUND, Gateway, Heard, Stack, info_of, prompt, running_stack
from waiting import until

from quire.launcher.redis import EmbeddedRedis


class ForgetfulRedis(EmbeddedRedis):
    """Keeps a file, and can be started again without what was written last."""

    @property
    def _file(self) -> Path:
        """What commands are appended to."""
        return max(self.directory.rglob("*.aof"), key=lambda path: path.stat().st_mtime_ns)

    @property
    def num_bytes(self) -> int:
        """Of what is written; everything that was answered is."""
        return self._file.stat().st_size

    def forget(self, num_bytes: int) -> None:
        """Dies, and comes back with so much of what was written."""
        self.kill()
        self.wait(5)
        os.truncate(self._file, num_bytes)
        self.start()


@pytest.fixture
def server() -> Iterator[ForgetfulRedis]:
    directory = tempfile.TemporaryDirectory(prefix="quire-")
    with directory as path, ForgetfulRedis(Path(path), appendonly=True) as server:
        yield server


async def has_more_tokens(heard: Heard, count: int) -> None:
    target = len(heard.token_ids) + count
    await until(lambda: len(heard.token_ids) >= target, f"{count} tokens more")


async def submitted(gateway: Gateway, tag: int, **asked: object) -> Heard:
    fields = {"max_tokens": 50, "seed": tag, "request_id": f"r{tag}", "num_logprobs": tag, **asked}
    heard = gateway.heard[await gateway.submit(prompt(9, tag), **fields)]
    await has_more_tokens(heard, 3)
    return heard


async def comes_back(stack: Stack, gateway: Gateway) -> Gateway:
    """A new stream, when the old one has ended."""
    await until(lambda: gateway.lost is not None, "the end of the stream")
    again = await stack.gateway()
    assert again.epoch > gateway.epoch
    return again


async def all_are_whole(stack: Stack, gateway: Gateway, worker: LedgerWorker) -> None:
    assert all(heard.is_whole for heard in await gateway.over())
    await until(lambda: not stack.engine.live, "the end of all")
    await until(lambda: stack.only_lane.is_empty, "an empty lane")
    await stack.only_lane.check_integrity()
    await worker.check()


async def test_redis_is_rolled_back_behind_the_worker_and_the_leader_knows_better(server, sockets):
    worker = LedgerWorker(1)
    async with running_stack(server.url, sockets, {"a": worker}, lease_s=0.6) as stack:
        gateway = await stack.gateway()
        early = await submitted(gateway, 1)
        num_bytes = server.num_bytes
        await has_more_tokens(early, 8)
        # Of which Redis will know nothing.
        late = await submitted(gateway, 2, n=2)
        ended = await submitted(gateway, 3, max_tokens=4)
        await until(lambda: ended.over, "an end")
        worker.gate.clear()
        server.forget(num_bytes)
        again = await comes_back(stack, gateway)
        await again.attach(late, *late.next_indices)
        await again.submit_again(early)
        worker.gate.set()
        await all_are_whole(stack, again, worker)
        # Whose end Redis has forgotten begins anew, for those who ask for it by all it was.
        ended.hears_again = True
        await again.submit_again(ended)
        await all_are_whole(stack, again, worker)


async def test_leader_and_redis_s_last_second_are_lost_together(server, sockets):
    worker = LedgerWorker(1)
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
        stack.lapse()
        worker.gate.set()
        again = await stack.gateway()
        # It has forgotten all of it, and so has everybody else.
        [unknown] = await again.over(await again.attach(lost))
        assert unknown.failure.code == NOT_FOUND
        assert info_of(unknown.failure).metadata["resumable"] == "false"
        again.heard = {k: h for k, h in again.heard.items() if h is not unknown}
        # What clients have already is sampled again, unsent.
        early.hears_again = late.hears_again = True
        num_sampled = worker.num_sampled_tokens
        for heard in (early, late):
            await again.submit_again(heard)
        num_heard = len(early.token_ids)
        await all_are_whole(stack, again, worker)
        assert worker.num_sampled_tokens - num_sampled > 50 - num_heard


async def test_an_epoch_is_lost_with_redis_s_last_second(server, sockets):
    worker = LedgerWorker(1)
    async with running_stack(server.url, sockets, {"a": worker}, lease_s=0.6) as stack:
        first = await stack.gateway()
        heard = await submitted(first, 1)
        num_bytes = server.num_bytes
        await stack.member.kill()
        stack.start_scheduler()
        stack.lapse()
        second = await stack.gateway()
        heard = second.heard[await second.submit_again(heard)]
        await has_more_tokens(heard, 3)
        worker.gate.clear()
        # Redis believes in the first leader again.
        server.forget(num_bytes)
        third = await comes_back(stack, second)
        worker.gate.set()
        await third.submit_again(heard)
        await all_are_whole(stack, third, worker)
        epochs = [plan.epoch for plan in worker.plans]
        assert epochs == sorted(epochs)
        assert list(dict.fromkeys(epochs)) == [first.epoch, second.epoch, third.epoch]
