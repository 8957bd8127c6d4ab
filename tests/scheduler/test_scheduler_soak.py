"""Random load, random trouble: every request ends as it should, and nothing is left."""

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from ledger_worker import LedgerWorker, token_at
from scheduler_stack import Gateway, Stack, running_stack
from waiting import until

from quire.internal.v1 import scheduler_pb2

ACTIONS = 300
MAX_OPEN = 24


@dataclass
class Soak:
    """One run: its random numbers, its stack, and its ledger of requests."""

    rng: random.Random
    stack: Stack
    max_model_len: int
    gateways: list[Gateway] = field(default_factory=list)
    disturbed: set[tuple[Gateway, int]] = field(default_factory=set)
    num_submitted: int = 0

    async def act(self) -> None:
        rng = self.rng
        gateway = rng.choice(self.gateways)
        open_ = [a for a, heard in gateway.heard.items() if not heard.over]
        started = [a for a in open_ if gateway.heard[a].token_ids]
        kind = rng.random()
        if kind < 0.72 and len(open_) < MAX_OPEN:
            await self.submit(gateway)
        elif kind < 0.82 and open_:
            await self.cancel(gateway, rng.choice(open_))
        elif kind < 0.9 and started:
            await self.finish(gateway, rng.choice(started))
        elif kind < 0.92:
            await self.leave(gateway)
        elif started:
            # Lets the scheduler work.
            attachment = started[0]
            await until(lambda: gateway.heard[attachment].over, "the end of a request")

    async def submit(self, gateway: Gateway) -> None:
        rng = self.rng
        length = rng.choice([1, 2, 3, 4, 5, 8, 16, 17, rng.randint(1, self.max_model_len - 1)])
        length = min(length, self.max_model_len - 1)
        seed = rng.randrange(10_000)
        stop = (token_at(seed, length + rng.randint(0, 8)),) if rng.random() < 0.3 else ()
        self.num_submitted += 1
        await gateway.submit(
            [rng.randrange(2) * 100 + index for index in range(length)],
            max_tokens=min(rng.choice([1, 2, 5, 30]), self.max_model_len - length),
            seed=seed,
            request_id=f"soak-{self.num_submitted}",
            stop_token_ids=stop,
            n=rng.choice([1, 1, 1, 2, 5, 16]),
            priority=rng.randint(-1, 1),
        )

    async def cancel(self, gateway: Gateway, attachment: int) -> None:
        self.disturbed.add((gateway, attachment))
        await gateway.send(cancellations=[scheduler_pb2.Cancellation(attachment=attachment)])

    async def finish(self, gateway: Gateway, attachment: int) -> None:
        self.disturbed.add((gateway, attachment))
        num_tokens = self.rng.randint(1, len(gateway.heard[attachment].token_ids))
        finish = scheduler_pb2.Finish(attachment=attachment, num_tokens=num_tokens)
        await gateway.send(finishes=[finish])

    async def leave(self, gateway: Gateway) -> None:
        """Disconnects; another gateway comes instead."""
        await gateway.close()
        self.gateways.remove(gateway)
        self.gateways.append(await self.stack.gateway())

    async def check(self) -> None:
        for gateway in self.gateways:
            await gateway.over()
            for attachment, heard in gateway.heard.items():
                is_whole = (gateway, attachment) not in self.disturbed
                assert not (is_whole and heard.failure)
                for index, choice in enumerate(heard.choices):
                    output = heard.output(index)
                    assert choice.token_ids == output[: len(choice.token_ids)]
                    assert not is_whole or choice.token_ids == output


async def soak(redis_url: str, sockets: Path, seed: int) -> None:
    rng = random.Random(seed)
    block_size, max_model_len = rng.choice([2, 4, 16]), rng.choice([32, 64])
    # Down to a pool that just holds the longest sequence.
    num_blocks = 1 + max_model_len // block_size + rng.choice([0, 1, 8])
    workers = {
        f"w{index}": LedgerWorker(
            index + 1,
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=rng.choice([1, 3, 8]),
            max_model_len=max_model_len,
            num_host_blocks=rng.choice([0, 4, 64]),
        )
        for index in range(rng.choice([1, 2, 3]))
    }
    async with running_stack(
        redis_url,
        sockets,
        workers,
        watermark=0,
        max_num_batched_tokens=rng.choice([8, 32]),
        batch_policy=rng.choice(["chunked", "prefill_first"]),
        scheduling_policy=rng.choice(["fcfs", "priority"]),
        preemption_mode=rng.choice(["auto", "recompute", "swap"]),
        pipeline_depth=rng.randint(1, 4),
        long_prefill_token_threshold=rng.choice([0, 6]),
        max_num_partial_prefills=rng.choice([None, 1, 2]),
        max_long_partial_prefills=rng.choice([None, 1]),
        enable_prefix_caching=rng.random() < 0.75,
    ) as stack:
        run = Soak(rng, stack, max_model_len)
        run.gateways = [await stack.gateway() for _ in range(2)]
        for _ in range(ACTIONS):
            await run.act()
        await run.check()
        await until(
            lambda: all(not worker.rows for worker in workers.values()),
            "the release of all rows",
        )
        for worker in workers.values():
            worker.check()


@pytest.mark.parametrize("seed", range(4))
async def test_soak(redis_url, tmp_path_factory, seed):
    await soak(redis_url, tmp_path_factory.mktemp("s"), seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4, 40))
async def test_long_soak(redis_url, tmp_path_factory, seed):
    await soak(redis_url, tmp_path_factory.mktemp("s"), seed)
