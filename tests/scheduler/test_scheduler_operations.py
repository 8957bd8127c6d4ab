from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import pytest
from checking_worker import CheckingWorker
from scheduler_stack import info_of, running_stack
from scripted_engine import CACHED, FREE, HELD, NULL, ScriptedEngine

from quire.internal.v1 import operations_pb2, operations_pb2_grpc
from scheduler_svc.core.stats import LaneStats
from scheduler_svc.operations.servicer import LedShard, OperationsServicer

STATUS = operations_pb2.GetStatusRequest()
STATUS_WITH_MAPS = operations_pb2.GetStatusRequest(with_block_maps=True)
RESET = operations_pb2.ResetPrefixCacheRequest()
LEADER = "10.0.0.7:50052"


@dataclass
class Operations:
    # By shard, what the servicer leads.
    led: dict[int, LedShard]
    stub: operations_pb2_grpc.OperationsServiceStub


@pytest.fixture
async def operations() -> AsyncIterator[Operations]:
    led: dict[int, LedShard] = {}
    servicer = OperationsServicer(led.get, lambda shard: LEADER, lambda: None)
    server = grpc.aio.server()
    operations_pb2_grpc.add_OperationsServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Operations(led, operations_pb2_grpc.OperationsServiceStub(channel))
    await server.stop(None)


async def test_a_standby_refuses_every_call_and_names_the_leader(
    operations: Operations,
) -> None:
    for has_led in (False, True):
        if has_led:
            operations.led[0] = LedShard(ScriptedEngine(), epoch=1)
            assert (await operations.stub.GetStatus(STATUS)).epoch == 1
            del operations.led[0]
        for call in (operations.stub.GetStatus(STATUS), operations.stub.ResetPrefixCache(RESET)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert info_of(caught.value).metadata["leader"] == LEADER


async def test_the_status_reports_queue_and_workers(operations: Operations) -> None:
    engine = ScriptedEngine()
    engine.add(12, FREE).draining = True
    lane = engine.add(10, HELD, HELD, FREE, FREE, CACHED, FREE, FREE)
    lane.rows, lane.assigned, lane.num_swapped = [1, 2, 3], [4], 2
    lane.stats = LaneStats(
        num_steps=3, num_scheduled_tokens=50, worker_idle_ns=5, worker_starting_ns=2
    )
    engine.waiting.extend([100, 20])
    engine.stats.num_accepted = 9
    engine.refused_workers["b:1"] = "another model"
    operations.led[0] = LedShard(engine, epoch=77)

    status = await operations.stub.GetStatus(STATUS)
    assert (status.epoch, status.num_accepted) == (77, 9)
    assert (status.queue.num_requests, status.queue.num_tokens) == (2, 120)
    first, second = status.workers
    assert (first.incarnation, second.incarnation, second.draining) == (10, 12, True)
    assert (first.num_running, first.num_assigned, first.num_swapped) == (3, 1, 2)
    assert (first.num_steps, first.num_scheduled_tokens, first.idle_ns) == (3, 50, 5)
    assert first.starting_ns == 2
    assert (first.num_blocks, first.num_free_blocks) == (7, 5)
    assert not first.HasField("num_cached_blocks")
    assert lane.pool.num_reads == 0
    [refused] = status.refused_workers
    assert (refused.address, refused.reason) == ("b:1", "another model")

    first, _ = (await operations.stub.GetStatus(STATUS_WITH_MAPS)).workers
    assert first.block_map == bytes([NULL, HELD, HELD, FREE, FREE, CACHED, FREE, FREE])
    assert first.num_cached_blocks == 1


async def test_a_pool_that_does_not_respond_is_reported_without_a_map(
    operations: Operations,
) -> None:
    engine = ScriptedEngine()
    engine.add(10, HELD, FREE).pool.is_away = True
    operations.led[0] = LedShard(engine, epoch=1)
    [worker] = (await operations.stub.GetStatus(STATUS_WITH_MAPS)).workers
    assert (worker.num_free_blocks, worker.block_map) == (1, b"")
    assert not worker.HasField("num_cached_blocks")


async def test_a_map_that_was_slow_to_read_is_reused(operations: Operations) -> None:
    engine = ScriptedEngine()
    lane = engine.add(10, HELD, FREE)
    lane.pool.read_s = 0.2
    operations.led[0] = LedShard(engine, epoch=1)
    for _ in range(3):
        [worker] = (await operations.stub.GetStatus(STATUS_WITH_MAPS)).workers
        assert worker.block_map == bytes([NULL, HELD, FREE])
    assert lane.pool.num_reads == 1


async def test_a_reset_reaches_every_pool(operations: Operations) -> None:
    engine = ScriptedEngine()
    engine.add(10, CACHED, CACHED, CACHED, HELD)
    lane = engine.add(11, CACHED, FREE)
    operations.led[0] = LedShard(engine, epoch=1)
    assert (await operations.stub.ResetPrefixCache(RESET)).num_blocks == 4
    lane.pool.is_away = True
    with pytest.raises(grpc.aio.AioRpcError, match="Redis: gone"):
        await operations.stub.ResetPrefixCache(RESET)


async def test_a_scheduler_reports_its_workers_and_resets_their_prefix_caches(
    redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    sockets = tmp_path_factory.mktemp("s")
    worker = CheckingWorker(incarnation=10, num_blocks=32, block_size=4)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        stub = operations_pb2_grpc.OperationsServiceStub(stack.channel)
        gateway = await stack.gateway()

        async def hit_tokens() -> int:
            """Cached tokens of a prompt that is always the same."""
            attachment = await gateway.submit(list(range(9)), max_tokens=2)
            [received] = await gateway.wait_ended(attachment)
            return received.end.num_cached_prompt_tokens

        assert [await hit_tokens(), await hit_tokens()] == [0, 8]
        status = await stub.GetStatus(STATUS_WITH_MAPS)
        assert (status.num_accepted, status.queue.num_requests) == (2, 0)
        [worker_status] = status.workers
        assert worker_status.address == f"unix:{sockets}/a.sock"
        assert (
            worker_status.num_blocks,
            worker_status.num_free_blocks,
            worker_status.num_cached_blocks,
        ) == (31, 31, 2)
        assert sorted(worker_status.block_map) == [NULL, *[FREE] * 29, *[CACHED] * 2]
        assert (worker_status.num_queried_tokens, worker_status.num_hit_tokens) == (18, 8)

        assert (await stub.ResetPrefixCache(RESET)).num_blocks == 2
        assert [await hit_tokens(), await hit_tokens()] == [0, 8]
