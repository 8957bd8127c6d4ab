"""What the random load must not take for a fault, told as cases."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from ledger_worker import LedgerWorker
from scheduler_load import Load, worker_name
from scheduler_stack import running_stack
from waiting import until


@contextlib.asynccontextmanager
async def one_request(redis_url: str, sockets: Path, worker: LedgerWorker) -> AsyncIterator[Load]:
    """It has some tokens, and its next one is held back; in the end all must be well."""
    async with running_stack(
        redis_url, sockets, {worker_name(0): worker}, lease_s=0.6, pipeline_depth=1
    ) as stack:
        load = Load(stack, [worker], max_model_len=64)
        await load.start()
        await load.submit(
            gateway=0,
            length=9,
            tag=0,
            max_tokens=30,
            seed=1,
            stop_at=None,
            n=1,
            priority=0,
            num_logprobs=1,
        )
        [request] = load.requests
        await until(lambda: len(request.heard.token_ids) >= 5, "tokens")
        worker.gate.clear()
        await until(lambda: worker.is_held_back, "a step that is held back")
        yield load
        await load.settle()
        await load.check()


async def cut(load: Load) -> None:
    """Its gateway wants one token less than it has."""
    [request], [group] = load.requests, load.engine.live.values()
    [sequence] = group.sequences
    await load.cut(request, 0, len(request.heard.token_ids) - 1)
    await until(lambda: sequence.is_over or sequence.num_kept_tokens is not None, "the cut")


async def end_unheard(load: Load, worker: LedgerWorker) -> None:
    """Redis alone knows of the end when it returns."""
    recorder = load.engine._recorder
    await load.gateways[0].close()
    worker.gate.set()
    await until(lambda: not load.engine.live, "the end")
    await until(lambda: not recorder.unwritten, "its record")


async def test_what_ended_unheard_before_redis_was_emptied_begins_anew(redis_url, sockets):
    worker = LedgerWorker(1)
    async with one_request(redis_url, sockets, worker) as load:
        await end_unheard(load, worker)
        await load.replace_gateway(0)
        # Nobody has read yet what the new gateway has asked for.
        await load.empty_redis()


async def test_what_has_begun_anew_is_cut_before_its_tokens_are_there(redis_url, sockets):
    worker = LedgerWorker(1)
    async with one_request(redis_url, sockets, worker) as load:
        await end_unheard(load, worker)
        worker.gate.clear()
        await load.replace_gateway(0)
        await load.empty_redis()
        await until(lambda: bool(load.engine.live), "the request")
        await cut(load)


async def test_what_was_cut_and_ended_unheard_is_said_again_whole(redis_url, sockets):
    worker = LedgerWorker(1)
    async with one_request(redis_url, sockets, worker) as load:
        await cut(load)
        await end_unheard(load, worker)
        await load.replace_gateway(0)
