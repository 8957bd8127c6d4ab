"""Cases that the random load must not report as faults."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from checking_worker import CheckingWorker
from scheduler_load import Load, worker_name
from scheduler_stack import running_stack
from waiting import until


@contextlib.asynccontextmanager
async def one_request(redis_url: str, sockets: Path, worker: CheckingWorker) -> AsyncIterator[Load]:
    """A request with some tokens, whose next step is held back; at the end the load is checked."""
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
        await until(lambda: len(request.received.token_ids) >= 5, "tokens")
        worker.gate.clear()
        await until(lambda: worker.is_held_back, "a step that is held back")
        yield load
        await load.finish()
        await load.check()


async def cut(load: Load) -> None:
    """Finish the request at one token fewer than it has."""
    [request], [group] = load.requests, load.engine.live.values()
    [sequence] = group.sequences
    await load.cut(request, 0, len(request.received.token_ids) - 1)
    await until(lambda: sequence.is_ended or sequence.num_kept_tokens is not None, "the cut")


async def end_without_gateway(load: Load, worker: CheckingWorker) -> None:
    """End the request without a gateway: only Redis has its end afterwards."""
    record_writer = load.engine._record_writer
    await load.gateways[0].close()
    worker.gate.set()
    await until(lambda: not load.engine.live, "the end")
    await until(lambda: not record_writer.unwritten, "its record")


async def test_a_request_that_ended_without_a_gateway_before_redis_was_emptied_starts_again(
    redis_url, sockets
):
    worker = CheckingWorker(1)
    async with one_request(redis_url, sockets, worker) as load:
        await end_without_gateway(load, worker)
        await load.replace_gateway(0)
        # The new gateway's request has not been read yet.
        await load.empty_redis()


async def test_a_restarted_request_is_cut_before_its_tokens_are_sampled(redis_url, sockets):
    worker = CheckingWorker(1)
    async with one_request(redis_url, sockets, worker) as load:
        await end_without_gateway(load, worker)
        worker.gate.clear()
        await load.replace_gateway(0)
        await load.empty_redis()
        await until(lambda: bool(load.engine.live), "the request")
        await cut(load)


async def test_a_request_cut_and_ended_without_a_gateway_is_delivered_whole(redis_url, sockets):
    worker = CheckingWorker(1)
    async with one_request(redis_url, sockets, worker) as load:
        await cut(load)
        await end_without_gateway(load, worker)
        await load.replace_gateway(0)
