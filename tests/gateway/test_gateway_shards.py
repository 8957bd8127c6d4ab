"""Requests of several shards: their choice, moves, lookups, and shards that have no leader."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from gateway_fake_scheduler import FakeScheduler
from gateway_shards import Cluster, Settings, cluster_of, fail, gateway_of, send_to
from gateway_stack import Stack, info_of
from grpc_health.v1 import health_pb2
from grpc_status import rpc_status
from waiting import until

from quire.internal.v1 import scheduler_pb2
from quire.v1 import inference_pb2 as pb

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
REQUEST = pb.StreamGenerateRequest(text="The quick", request_id="mine")
TEXT = "brown fox jumps over the lazy dog"
FULL = grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with cluster_of(4) as cluster:
        cluster.grow(2)
        yield cluster


@pytest.fixture
async def stack(settings_for: Settings, cluster: Cluster) -> AsyncIterator[Stack]:
    """Of a gateway that knows the address of the first shard's leader alone."""
    async with gateway_of(settings_for(scheduler=cluster.address(0)), cluster) as stack:
        await asyncio.wait_for(stack.wait_for_status(SERVING), 10)
        await cluster.known_to(stack)
        yield stack


class Reading:
    """Reads a client's stream in a task, and checks that each token comes once and in order."""

    def __init__(self, call: grpc.aio.UnaryStreamCall) -> None:
        self.call = call
        self.text = ""
        self.token_ids: list[int] = []
        self.num_acceptances = 0
        self.task = asyncio.create_task(self._read(call))

    async def has(self, num_tokens: int) -> None:
        await until(lambda: len(self.token_ids) == num_tokens, f"{num_tokens} tokens")

    async def _read(self, call: grpc.aio.UnaryStreamCall) -> None:
        async for response in call:
            self.num_acceptances += not response.deltas and not response.HasField("usage")
            for delta in response.deltas:
                assert delta.first_token_index == len(self.token_ids)
                self.token_ids += delta.token_ids
                self.text += delta.text


async def next_of(queue: "asyncio.Queue[object]") -> object:
    return await asyncio.wait_for(queue.get(), 10)


async def disconnected(stack: Stack, scheduler: FakeScheduler) -> None:
    """Wait until the gateway knows that a shard has no leader."""
    await until(
        lambda: stack.gateway.scheduler.leaders[scheduler.shard] is None, "the end of the stream"
    )


async def begin(stack: Stack, cluster: Cluster) -> tuple[FakeScheduler, Reading, object]:
    """Start a stream, accepted with three tokens."""
    reading = Reading(stack.inference.StreamGenerate(REQUEST))
    scheduler, submission = await cluster.next_submission()
    scheduler.accept(submission)
    scheduler.write(submission, 0, stack.encode(TEXT)[:3])
    await reading.has(3)
    return scheduler, reading, submission


def finish(
    scheduler: FakeScheduler, stack: Stack, request: scheduler_pb2.Submission, first: int = 0
) -> None:
    """Accept a request and send its output from a token on."""
    ids = stack.encode(TEXT)
    scheduler.accept(request, request.opaque)
    scheduler.write(request, first, ids[first:])
    scheduler.end(request, len(ids))


async def test_streams_of_all_shards_run_beside_each_other(stack: Stack, cluster: Cluster) -> None:
    """A shard that reports a high load is given nothing new."""
    for shard in (0, 1, 0):
        cluster.num_live = [100 if other != shard else 0 for other in range(4)]
        cluster.report()
        # A part behind the report in the same stream: it has been read then.
        call = stack.inference.CancelGenerate(pb.CancelGenerateRequest(request_id="none"))
        cancel = asyncio.ensure_future(call)
        for scheduler in cluster.schedulers[:2]:
            scheduler.found(await next_of(scheduler.cancellations), True)
        await cancel
        call = asyncio.ensure_future(stack.inference.Generate(pb.GenerateRequest(text="x")))
        scheduler = cluster.schedulers[shard]
        finish(scheduler, stack, await next_of(scheduler.submissions))
        assert (await call).choices[0].text == TEXT


async def test_the_same_prefix_goes_to_the_same_shard(stack: Stack, cluster: Cluster) -> None:
    chosen = set()
    for _ in range(6):
        call = asyncio.ensure_future(stack.inference.Generate(pb.GenerateRequest(text="x")))
        scheduler, submission = await cluster.next_submission()
        finish(scheduler, stack, submission)
        await call
        chosen.add(scheduler.shard)
    assert len(chosen) == 1


async def test_the_number_of_shards_rises_while_a_stream_runs(
    stack: Stack, cluster: Cluster
) -> None:
    first, reading, submission = await begin(stack, cluster)
    cluster.grow(4)
    await cluster.known_to(stack)
    assert stack.gateway.scheduler.requests.num_shards == 4
    cluster.num_live = [100, 100, 100, 0]
    cluster.report()
    # It never falls: an older view is ignored.
    stale = cluster.state
    del stale.shards[2:]
    cluster.schedulers[0].send(cluster=stale)
    last = cluster.schedulers[3]
    for _ in range(50):
        call = asyncio.ensure_future(stack.inference.Generate(pb.GenerateRequest(text="x")))
        scheduler, other = await cluster.next_submission()
        finish(scheduler, stack, other)
        await call
        if scheduler is last:
            break
    assert scheduler is last
    first.write(submission, 3, stack.encode(TEXT)[3:])
    first.end(submission, len(stack.encode(TEXT)))
    await reading.task
    assert reading.text == TEXT
    assert stack.gateway.scheduler.requests.num_shards == 4


async def test_a_shard_without_a_leader_does_not_disturb_the_other(
    stack: Stack, cluster: Cluster
) -> None:
    scheduler, reading, _ = await begin(stack, cluster)
    other = cluster.other_than(scheduler)
    scheduler.leads = False
    scheduler.drop_stream()
    await disconnected(stack, scheduler)
    # The prefix is the same, but its shard has no leader.
    for _ in range(3):
        call = asyncio.ensure_future(stack.inference.Generate(pb.GenerateRequest(text="The quick")))
        finish(other, stack, await next_of(other.submissions))
        assert (await call).choices[0].text == TEXT
    assert stack.gateway.health.ready
    assert not reading.task.done()
    scheduler.epoch += 1
    scheduler.leads = True
    again = await next_of(scheduler.submissions)
    assert (again.again, list(again.next_indices)) == (True, [3])
    assert again.attachment_generation == scheduler_pb2.AttachmentGeneration(
        epoch=scheduler.epoch - 1, number=1
    )
    finish(scheduler, stack, again, 3)
    await reading.task
    assert reading.text == TEXT


async def test_the_gateway_is_ready_while_one_shard_is(stack: Stack, cluster: Cluster) -> None:
    for scheduler in cluster.schedulers[:2]:
        assert stack.gateway.health.ready
        scheduler.leads = False
        scheduler.drop_stream()
    await asyncio.wait_for(stack.wait_for_status(NOT_SERVING), 10)
    assert stack.gateway.health.failing["scheduler"].startswith("shard 0: ")
    cluster.schedulers[1].leads = True
    await asyncio.wait_for(stack.wait_for_status(SERVING), 10)


async def test_a_leader_is_found_by_the_address_that_another_scheduler_names(
    settings_for: Settings,
) -> None:
    """Neither leader is among the configured addresses."""
    standby = FakeScheduler(shard=9)
    port = await standby.start()
    async with cluster_of(2) as cluster:
        standby.leaders = {0: cluster.address(0)}
        for scheduler in cluster.schedulers:
            scheduler.leaders = {0: cluster.address(0), 1: cluster.address(1)}
        cluster.grow(2)
        async with gateway_of(settings_for(scheduler=f"127.0.0.1:{port}"), cluster) as stack:
            await asyncio.wait_for(stack.wait_for_status(SERVING), 10)
            await cluster.known_to(stack)
            assert stack.gateway.scheduler.leaders == [cluster.address(0), cluster.address(1)]
    await standby.stop()


async def test_a_gateway_that_starts_finds_the_shards_while_the_first_has_no_leader(
    settings_for: Settings,
) -> None:
    standby = FakeScheduler(shard=9)
    port = await standby.start()
    async with cluster_of(3) as cluster:
        standby.num_shards = 3
        standby.leaders = {1: cluster.address(1), 2: cluster.address(2)}
        cluster.schedulers[0].leads = False
        cluster.grow(3)
        async with gateway_of(settings_for(scheduler=f"127.0.0.1:{port}"), cluster) as stack:
            await asyncio.wait_for(stack.wait_for_status(SERVING), 10)
            shards = stack.gateway.scheduler
            found = [None, cluster.address(1), cluster.address(2)]
            await until(lambda: shards.leaders == found, "the other shards")
            call = asyncio.ensure_future(stack.inference.Generate(pb.GenerateRequest(text="x")))
            scheduler, submission = await cluster.next_submission()
            finish(scheduler, stack, submission)
            assert (await call).choices[0].text == TEXT
            # Then the first one gets a leader.
            cluster.schedulers[0].leads = True
            standby.leaders[0] = cluster.address(0)
            await until(lambda: None not in shards.leaders, "the first shard")
    await standby.stop()


async def test_a_stream_is_resumed_where_another_gateway_left_it(
    settings_for: Settings, stack: Stack, cluster: Cluster
) -> None:
    async with cluster_of(2) as copy:
        # The same shards' schedulers, for the second gateway: each fake serves one.
        copy.grow(2)
        _, reading, submission = await begin(stack, cluster)
        settings = settings_for(scheduler=copy.address(0))
        async with gateway_of(settings, copy) as second:
            await copy.known_to(second)
            call = second.inference.ResumeGenerate(
                pb.ResumeGenerateRequest(request_id="mine", next_token_indices=[3])
            )
            for shard, scheduler in enumerate(copy.schedulers):
                lookup = await next_of(scheduler.lookups)
                assert lookup.request.request_id == "mine"
                scheduler.found(lookup, shard == 1)
            attachment = await next_of(copy.schedulers[1].attachments)
            ids = stack.encode(TEXT)
            copy.schedulers[1].accept(attachment, submission.opaque)
            copy.schedulers[1].write(attachment, 0, ids)
            copy.schedulers[1].end(attachment, len(ids))
            responses = [response async for response in call]
            found = [id_ for r in responses for delta in r.deltas for id_ in delta.token_ids]
            assert found == ids[3:]
            assert copy.schedulers[0].attachments.empty()
        reading.call.cancel()
        await asyncio.gather(reading.task, return_exceptions=True)


async def resumed(stack: Stack) -> "asyncio.Task[object]":
    call = stack.inference.ResumeGenerate(pb.ResumeGenerateRequest(request_id="mine"))
    return asyncio.ensure_future(call.read())


async def test_a_request_that_no_shard_knows(stack: Stack, cluster: Cluster) -> None:
    reading = await resumed(stack)
    for scheduler in cluster.schedulers[:2]:
        scheduler.found(await next_of(scheduler.lookups), False)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await reading
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert info_of(caught.value).reason == "UNKNOWN_REQUEST"
    assert info_of(caught.value).metadata == {"resumable": "false"}


async def test_a_lookup_is_sent_again_to_the_next_leader(stack: Stack, cluster: Cluster) -> None:
    reading = await resumed(stack)
    one, other = cluster.schedulers[:2]
    one.found(await next_of(one.lookups), False)
    first = await next_of(other.lookups)
    other.drop_stream()
    again = await next_of(other.lookups)
    assert again == first
    other.found(again, False)
    with pytest.raises(grpc.aio.AioRpcError):
        await reading


async def test_a_client_that_disconnects_during_a_lookup(stack: Stack, cluster: Cluster) -> None:
    call = stack.inference.ResumeGenerate(pb.ResumeGenerateRequest(request_id="mine"))
    lookup = await next_of(cluster.schedulers[1].lookups)
    call.cancel()
    await until(stack.is_idle, "the end of the lookup")
    cluster.schedulers[1].found(lookup, True)
    call = asyncio.ensure_future(stack.inference.Generate(pb.GenerateRequest(text="x")))
    scheduler, submission = await cluster.next_submission()
    finish(scheduler, stack, submission)
    await call
    assert all(one.attachments.empty() for one in cluster.schedulers)


async def test_a_lookup_waits_for_a_leader_and_times_out(
    settings_for: Settings, cluster: Cluster
) -> None:
    settings = settings_for(scheduler=cluster.address(0), scheduler_wait_s=0.4)
    async with gateway_of(settings, cluster) as stack:
        await cluster.known_to(stack)
        await cluster.schedulers[1].stop()
        reading = await resumed(stack)
        cluster.schedulers[0].found(await next_of(cluster.schedulers[0].lookups), False)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await reading
        assert info_of(caught.value).reason == "SCHEDULER_AWAY"


async def test_a_request_that_moved_between_lookup_and_attachment(
    stack: Stack, cluster: Cluster
) -> None:
    call = stack.inference.ResumeGenerate(pb.ResumeGenerateRequest(request_id="mine"))
    one, other = cluster.schedulers[:2]
    for found in (True, False):
        # The first shard has it, then the other one.
        for scheduler in (one, other):
            scheduler.found(await next_of(scheduler.lookups), (scheduler is one) == found)
        attachment = await next_of((one if found else other).attachments)
        if found:
            fail(one, attachment, grpc.StatusCode.NOT_FOUND, "UNKNOWN_REQUEST")
    # And back to the first.
    send_to(other, attachment, 0)
    attachment = await next_of(one.attachments)
    state = scheduler_pb2.Submission()
    finished = stack.inference.Generate(pb.GenerateRequest(text="x"))
    scheduler, submission = await cluster.next_submission()
    state.CopyFrom(submission)
    finish(scheduler, stack, submission)
    await finished
    one.accept(attachment, state.opaque)
    one.write(attachment, 0, stack.encode(TEXT))
    one.end(attachment, len(stack.encode(TEXT)))
    text = "".join([delta.text async for response in call for delta in response.deltas])
    assert text == TEXT


async def test_a_request_that_is_unknown_again_and_again(stack: Stack, cluster: Cluster) -> None:
    """A shard that has an id, but not when it is attached to."""
    reading = await resumed(stack)
    one = cluster.schedulers[0]
    num_attachments = 0
    while not reading.done():
        if not one.lookups.empty():
            one.found(one.lookups.get_nowait(), True)
        if not one.attachments.empty():
            num_attachments += 1
            attachment = one.attachments.get_nowait()
            fail(one, attachment, grpc.StatusCode.NOT_FOUND, "UNKNOWN_REQUEST")
        await asyncio.sleep(0)
    assert 1 < num_attachments < 10
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await reading
    assert info_of(caught.value).reason == "UNKNOWN_REQUEST"


async def cancellation(stack: Stack) -> "asyncio.Future[object]":
    call = stack.inference.CancelGenerate(pb.CancelGenerateRequest(request_id="theirs"))
    return asyncio.ensure_future(call)


@pytest.mark.parametrize("shard", [0, 1])
async def test_a_request_of_any_shard_is_cancelled(
    stack: Stack, cluster: Cluster, shard: int
) -> None:
    """The other shard need not respond."""
    call = await cancellation(stack)
    for scheduler in cluster.schedulers[:2]:
        sent = await next_of(scheduler.cancellations)
        assert sent.request.request_id == "theirs"
        if scheduler.shard == shard:
            scheduler.found(sent, True)
    await call


async def test_a_cancellation_that_no_shard_finds(stack: Stack, cluster: Cluster) -> None:
    call = await cancellation(stack)
    one, other = cluster.schedulers[:2]
    one.found(await next_of(one.cancellations), False)
    await next_of(other.cancellations)
    other.leads = False
    other.drop_stream()
    await disconnected(stack, other)
    assert not call.done()
    other.leads = True
    other.found(await next_of(other.cancellations), False)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_request_that_moves_while_it_is_cancelled(stack: Stack, cluster: Cluster) -> None:
    """Neither shard has it when it is asked."""
    scheduler, reading, submission = await begin(stack, cluster)
    other = cluster.other_than(scheduler)
    call = await cancellation(stack)
    first, second = [await next_of(one.cancellations) for one in (scheduler, other)]
    send_to(scheduler, submission, other.shard)
    scheduler.found(first, False)
    moved = await next_of(other.submissions)
    other.found(second, False)
    scheduler.found(await next_of(scheduler.cancellations), False)
    other.found(await next_of(other.cancellations), True)
    await call
    fail(other, moved, grpc.StatusCode.CANCELLED, "CANCELLED")
    with pytest.raises(grpc.aio.AioRpcError):
        await reading.task


async def test_a_request_that_another_shard_has_accepted_before(
    stack: Stack, cluster: Cluster
) -> None:
    """Its id was submitted again."""
    reading = Reading(stack.inference.StreamGenerate(REQUEST))
    scheduler, submission = await cluster.next_submission()
    assert submission.has_client_id
    other = cluster.other_than(scheduler)
    send_to(scheduler, submission, other.shard)
    moved = await next_of(other.submissions)
    assert (moved.request_id, moved.digest) == (submission.request_id, submission.digest)
    assert (moved.again, list(moved.next_indices)) == (False, [0])
    finish(other, stack, moved)
    await reading.task
    assert reading.text == TEXT
    assert reading.num_acceptances == 1


async def test_a_stream_that_moves_loses_and_repeats_nothing(
    stack: Stack, cluster: Cluster
) -> None:
    scheduler, reading, submission = await begin(stack, cluster)
    other = cluster.other_than(scheduler)
    ids = stack.encode(TEXT)
    for first in range(3, 6):
        send_to(scheduler, submission, other.shard)
        # What the shard that had it sends late is ignored.
        scheduler.write(submission, first, [ids[0]])
        moved = await next_of(other.submissions)
        assert (moved.again, list(moved.next_indices)) == (True, [first])
        # Epochs of different shards are not comparable.
        assert moved.attachment_generation.is_of_former_shard
        other.accept(moved, moved.opaque)
        # Begins before the requested index.
        other.write(moved, first - 2, ids[first - 2 : first + 1])
        await reading.has(first + 1)
        scheduler, other, submission = other, scheduler, moved
    scheduler.write(submission, 6, ids[6:])
    scheduler.end(submission, len(ids))
    await reading.task
    assert (reading.text, reading.token_ids) == (TEXT, ids)
    assert reading.num_acceptances == 1


async def test_a_stream_moves_as_often_as_shards_accept_it(stack: Stack, cluster: Cluster) -> None:
    scheduler, reading, submission = await begin(stack, cluster)
    for _ in range(12):
        other = cluster.other_than(scheduler)
        send_to(scheduler, submission, other.shard)
        moved = await next_of(other.submissions)
        other.accept(moved, moved.opaque)
        scheduler, submission = other, moved
    finish(scheduler, stack, submission, 3)
    await reading.task
    assert reading.text == TEXT


async def test_a_stream_moves_to_a_shard_that_was_not_known(stack: Stack, cluster: Cluster) -> None:
    scheduler, reading, submission = await begin(stack, cluster)
    scheduler.leaders = {shard: cluster.address(shard) for shard in range(4)}
    for one in cluster.schedulers[:2]:
        one.leaders = scheduler.leaders
    send_to(scheduler, submission, 3)
    moved = await next_of(cluster.schedulers[3].submissions)
    finish(cluster.schedulers[3], stack, moved, 3)
    await reading.task
    assert reading.text == TEXT


@pytest.mark.parametrize("accepted", [False, True])
async def test_shards_that_send_a_request_to_each_other(
    stack: Stack, cluster: Cluster, accepted: bool
) -> None:
    call = stack.inference.StreamGenerate(REQUEST)
    scheduler, submission = await cluster.next_submission()
    if accepted:
        scheduler.accept(submission)
        await call.read()
    reading = asyncio.ensure_future(call.read())
    num_moves = 0
    while True:
        other = cluster.other_than(scheduler)
        send_to(scheduler, submission, other.shard)
        await until(lambda at=other: reading.done() or not at.submissions.empty(), "the next")
        if reading.done():
            break
        num_moves += 1
        scheduler, submission = other, other.submissions.get_nowait()
    assert num_moves == 8
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await reading
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert info_of(caught.value).reason == "NO_SHARD"
    assert info_of(caught.value).metadata == ({"resumable": "true"} if accepted else {})


async def test_a_moved_stream_waits_no_longer_than_others(
    settings_for: Settings, cluster: Cluster
) -> None:
    settings = settings_for(scheduler=cluster.address(0), scheduler_wait_s=0.4)
    async with gateway_of(settings, cluster) as stack:
        await cluster.known_to(stack)
        call = stack.inference.StreamGenerate(REQUEST)
        scheduler, submission = await cluster.next_submission()
        other = cluster.other_than(scheduler)
        await other.stop()
        await disconnected(stack, other)
        send_to(scheduler, submission, other.shard)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert info_of(caught.value).reason == "SCHEDULER_AWAY"


@pytest.mark.parametrize("reason", ["QUEUE_FULL", "LIVE_REQUESTS", "TOKENS_PER_MINUTE"])
async def test_a_request_that_one_shard_has_no_room_for(
    stack: Stack, cluster: Cluster, reason: str
) -> None:
    reading = Reading(stack.inference.StreamGenerate(pb.StreamGenerateRequest(text="The quick")))
    scheduler, submission = await cluster.next_submission()
    assert not submission.has_client_id
    other = cluster.other_than(scheduler)
    # A tenant's limit holds over all shards: the one that has some of it left is named.
    named = {} if reason == "QUEUE_FULL" else {"shard": str(other.shard)}
    fail(scheduler, submission, FULL, reason, retry_s=2, **named)
    finish(other, stack, await next_of(other.submissions))
    await reading.task
    assert reading.text == TEXT


@pytest.mark.parametrize("reason", ["LIVE_REQUESTS", "REQUESTS_PER_MINUTE"])
async def test_a_request_beyond_a_limit_is_given_to_one_other_shard_at_most(
    stack: Stack, cluster: Cluster, reason: str
) -> None:
    cluster.grow(4)
    await cluster.known_to(stack)

    async def refused() -> "tuple[asyncio.Future[object], FakeScheduler]":
        call = asyncio.ensure_future(stack.inference.Generate(pb.GenerateRequest(text="x")))
        scheduler, submission = await cluster.next_submission()
        other = cluster.other_than(scheduler)
        fail(scheduler, submission, FULL, reason, retry_s=2, **named(other))
        return call, other

    named = lambda other: {"shard": str(other.shard)}  # noqa: E731
    call, other = await refused()
    third = next(s for s in cluster.schedulers if s is not other)
    fail(other, await next_of(other.submissions), FULL, reason, retry_s=1, **named(third))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert info_of(caught.value).reason == reason
    # Without a name it is final.
    for text in ("", "9999", "no number"):
        named = lambda other, text=text: {"shard": text} if text else {}  # noqa: E731
        call, _ = await refused()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert info_of(caught.value).reason == reason


async def test_a_request_whose_own_shard_has_no_room(stack: Stack, cluster: Cluster) -> None:
    """No other one may run it: its id belongs to this one."""
    call = stack.inference.StreamGenerate(REQUEST)
    reading = asyncio.ensure_future(call.read())
    scheduler, submission = await cluster.next_submission()
    other = cluster.other_than(scheduler)
    fail(scheduler, submission, FULL, "LIVE_REQUESTS", retry_s=2, shard=str(other.shard))
    again = await next_of(other.submissions)
    send_to(other, again, scheduler.shard)
    fail(scheduler, await next_of(scheduler.submissions), FULL, "LIVE_REQUESTS", retry_s=1)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(reading, 5)
    assert (caught.value.code(), info_of(caught.value).reason) == (FULL, "LIVE_REQUESTS")


async def test_a_request_whose_id_another_shard_without_room_has(
    stack: Stack, cluster: Cluster
) -> None:
    call = stack.inference.StreamGenerate(REQUEST)
    reading = asyncio.ensure_future(call.read())
    scheduler, submission = await cluster.next_submission()
    other = cluster.other_than(scheduler)
    cluster.grow(4)
    await cluster.known_to(stack)
    send_to(scheduler, submission, other.shard)
    fail(other, await next_of(other.submissions), FULL, "LIVE_REQUESTS", retry_s=1)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(reading, 5)
    assert (caught.value.code(), info_of(caught.value).reason) == (FULL, "LIVE_REQUESTS")


async def test_a_request_that_no_shard_has_room_for(stack: Stack, cluster: Cluster) -> None:
    """Each is asked once, and the error is that with the shortest time."""
    cluster.grow(4)
    await cluster.known_to(stack)
    cluster.num_workers[3] = 0
    cluster.report()
    await cluster.known_to(stack)
    call = asyncio.ensure_future(stack.inference.Generate(pb.GenerateRequest(text="x")))
    asked = []
    for retry_s in (5, 3, 4):
        scheduler, submission = await cluster.next_submission()
        asked.append(scheduler.shard)
        fail(scheduler, submission, FULL, "QUEUE_FULL", retry_s)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert sorted(asked) == [0, 1, 2]
    assert info_of(caught.value).reason == "QUEUE_FULL"
    details = rpc_status.from_call(caught.value).details
    assert any(b"\x08\x03" in detail.value for detail in details)


async def test_stopping_ends_lookups(settings_for: Settings, cluster: Cluster) -> None:
    async with gateway_of(settings_for(scheduler=cluster.address(0)), cluster) as stack:
        await cluster.known_to(stack)
        reading = await resumed(stack)
        await next_of(cluster.schedulers[1].lookups)
        await stack.gateway.stop()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await reading
        assert info_of(caught.value).reason == "STOPPING"
