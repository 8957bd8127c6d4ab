"""Leaders that fail, hang or send bad frames, and standbys, while clients keep streaming."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress

import grpc
import pytest
from gateway_fake_scheduler import MAX_MODEL_LEN, FakeScheduler
from gateway_stack import Stack, info_of
from google.protobuf import any_pb2
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2
from grpc_status import rpc_status
from waiting import until

from gateway_svc.server import Gateway
from gateway_svc.settings import GatewaySettings
from quire.internal.v1 import scheduler_pb2
from quire.service.channels import channel_options
from quire.v1 import inference_pb2 as pb

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
REQUEST = pb.StreamGenerateRequest(text="The quick", request_id="mine")
TEXT = "brown fox jumps"
Settings = Callable[..., GatewaySettings]


@asynccontextmanager
async def gateway_of(settings: GatewaySettings, scheduler: FakeScheduler) -> AsyncIterator[Stack]:
    gateway = Gateway(settings)
    address = await gateway.start()
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        stack = Stack(gateway, scheduler, 0, address, channel)
        await until(lambda: "tokenizer" not in gateway.health.failing, "the tokenizer")
        yield stack
        await asyncio.wait_for(gateway.calls.wait_until_idle(), 5)
        await until(stack.is_idle, "the ends of the calls")
    await gateway.stop()


class Pair:
    """Two schedulers, the first of which leads."""

    def __init__(self) -> None:
        self.leader, self.standby = FakeScheduler(), FakeScheduler()
        self.standby.leads = False
        self.ports: Sequence[int] = ()

    @property
    def addresses(self) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self.ports)

    async def stop_leader(self) -> None:
        await self.leader.stop()

    def promote_standby(self) -> None:
        self.standby.epoch = self.leader.epoch + 1
        self.standby.leads = True


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    pair = Pair()
    pair.ports = [await scheduler.start() for scheduler in (pair.leader, pair.standby)]
    yield pair
    for scheduler in (pair.leader, pair.standby):
        await scheduler.stop()


@pytest.fixture
async def stack(settings_for: Settings, pair: Pair) -> AsyncIterator[Stack]:
    async with gateway_of(settings_for(scheduler=pair.addresses), pair.leader) as stack:
        await asyncio.wait_for(stack.wait_for_status(SERVING), 10)
        yield stack


class Relay:
    """A TCP relay to a port, which can stop forwarding."""

    def __init__(self, port: int) -> None:
        self._to_port = port
        self._flows = asyncio.Event()
        self._flows.set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    def hold(self) -> None:
        """Stop forwarding bytes, also those of new connections."""
        self._flows.clear()

    def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", self._to_port)
        for source, sink in ((reader, there[1]), (there[0], writer)):
            task = asyncio.create_task(self._copy(source, sink))
            self._tasks.add(task)

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await source.read(2**16):
                await self._flows.wait()
                sink.write(data)
        sink.close()


class Reading:
    """Reads a client's stream in a task."""

    def __init__(self, call: grpc.aio.UnaryStreamCall) -> None:
        self.parts: dict[int, list[pb.ChoiceDelta]] = {}
        self.usage: pb.Usage | None = None
        self.num_responses = 0
        self.task = asyncio.create_task(self._read(call))

    def text(self, choice: int = 0) -> str:
        return "".join(part.text for part in self.parts.get(choice, []))

    def token_ids(self, choice: int = 0) -> list[int]:
        return [id_ for part in self.parts.get(choice, []) for id_ in part.token_ids]

    async def has(self, num_tokens: int, choice: int = 0) -> None:
        await until(lambda: len(self.token_ids(choice)) == num_tokens, f"{num_tokens} tokens")

    async def _read(self, call: grpc.aio.UnaryStreamCall) -> None:
        async for response in call:
            self.num_responses += 1
            for delta in response.deltas:
                parts = self.parts.setdefault(delta.index, [])
                assert delta.first_token_index == len(self.token_ids(delta.index))
                parts.append(delta)
            if response.HasField("usage"):
                self.usage = response.usage


async def next_submission(scheduler: FakeScheduler) -> scheduler_pb2.Submission:
    return await asyncio.wait_for(scheduler.submissions.get(), 10)


async def test_a_stream_survives_the_loss_of_its_leader(stack: Stack, pair: Pair) -> None:
    ids = stack.encode(TEXT)
    reading = Reading(stack.inference.StreamGenerate(REQUEST))
    first = await next_submission(pair.leader)
    assert not first.again
    assert not first.HasField("attachment_generation")
    pair.leader.accept(first)
    pair.leader.write(first, 0, ids[:3])
    await reading.has(3)
    await pair.stop_leader()
    await stack.wait_for_status(NOT_SERVING)
    pair.promote_standby()
    again = await next_submission(pair.standby)
    assert (again.again, again.next_indices) == (True, [3])
    assert again.attachment_generation == scheduler_pb2.AttachmentGeneration(
        epoch=pair.leader.epoch, number=1
    )
    assert (again.request_id, again.digest, again.opaque) == ("mine", first.digest, first.opaque)
    assert (again.prompt_token_ids, again.params) == (first.prompt_token_ids, first.params)
    pair.standby.accept(again, again.opaque)
    # Begins before the requested index.
    pair.standby.write(again, 1, ids[1:4])
    pair.standby.write(again, 4, ids[4:])
    pair.standby.end(again, len(ids))
    await reading.task
    assert (reading.text(), reading.token_ids()) == (TEXT, ids)
    # One response at the first acceptance, none at the second.
    assert reading.num_responses == 1 + len(reading.parts[0])
    assert reading.usage is not None
    assert reading.usage.completion_tokens == len(ids)


async def test_many_streams_are_attached_again_in_order(stack: Stack, pair: Pair) -> None:
    ids = stack.encode(TEXT)
    calls = [stack.inference.Generate(pb.GenerateRequest(text="x")) for _ in range(20)]
    pending = [asyncio.ensure_future(call) for call in calls]
    before = [await next_submission(pair.leader) for _ in calls]
    for submission in before:
        pair.leader.accept(submission)
    for submission in before[::2]:
        pair.leader.write(submission, 0, ids[:2])
    # Its effect shows that the frame above has been read.
    pair.leader.write(before[1], 0, ids)
    pair.leader.end(before[1], len(ids))
    # Not the second call: the threads of the tokenizer may submit the calls in another order.
    await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
    await pair.stop_leader()
    pair.promote_standby()
    after = [await next_submission(pair.standby) for _ in before[1:]]
    assert [s.request_id for s in after] == [s.request_id for s in before if s is not before[1]]
    assert len({s.attachment for s in (*before, *after)}) == len(before) + len(after)
    for submission in after:
        first = submission.next_indices[0]
        pair.standby.accept(submission)
        pair.standby.write(submission, first, ids[first:])
        pair.standby.end(submission, len(ids))
    for response in await asyncio.gather(*pending):
        assert response.choices[0].text == TEXT


async def test_a_finish_is_sent_again_to_the_next_leader(stack: Stack, pair: Pair) -> None:
    ids = stack.encode("ab STOP more")
    params = pb.SamplingParams(stop=["STOP"], n=2)
    reading = Reading(
        stack.inference.StreamGenerate(pb.StreamGenerateRequest(text="x", sampling_params=params))
    )
    first = await next_submission(pair.leader)
    pair.leader.accept(first)
    pair.leader.write(first, 0, ids)
    pair.leader.write(first, 0, ids[:1], choice=1)
    finish = await asyncio.wait_for(pair.leader.finishes.get(), 10)
    await reading.has(1, choice=1)
    await pair.stop_leader()
    pair.promote_standby()
    again = await next_submission(pair.standby)
    assert again.next_indices == [len(ids), 1]
    repeated = await asyncio.wait_for(pair.standby.finishes.get(), 10)
    assert repeated.attachment == again.attachment
    assert (repeated.choice, repeated.num_tokens) == (0, finish.num_tokens)
    pair.standby.accept(again)
    pair.standby.end(again, finish.num_tokens, scheduler_pb2.END_REASON_STOP_STRING)
    pair.standby.end(again, 1, choice=1)
    await reading.task
    assert (reading.text(), reading.text(1)) == ("ab ", "a")


async def test_new_requests_wait_for_the_next_leader(stack: Stack, pair: Pair) -> None:
    await pair.stop_leader()
    await stack.wait_for_status(NOT_SERVING)
    call = asyncio.ensure_future(stack.inference.Generate(pb.GenerateRequest(text="x")))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.inference.Generate(pb.GenerateRequest(text="x" * 10**6))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert stack.gateway.scheduler.max_model_len == MAX_MODEL_LEN
    pair.promote_standby()
    submission = await pair.standby.serve_one(stack.encode("fox"))
    assert (submission.again, submission.next_indices) == (False, [0])
    assert (await call).choices[0].text == "fox"


async def test_a_cancellation_waits_and_is_sent_to_the_next_leader(
    stack: Stack, pair: Pair
) -> None:
    request = pb.CancelGenerateRequest(request_id="theirs")
    before = asyncio.ensure_future(stack.inference.CancelGenerate(request))
    first = await asyncio.wait_for(pair.leader.cancellations.get(), 10)
    await pair.stop_leader()
    await stack.wait_for_status(NOT_SERVING)
    meanwhile = asyncio.ensure_future(stack.inference.CancelGenerate(request))
    await until(lambda: stack.gateway.calls.num_live == 2, "both calls")
    pair.promote_standby()
    tags = set()
    for _ in range(2):
        cancellation = await asyncio.wait_for(pair.standby.cancellations.get(), 10)
        assert cancellation.request.request_id == "theirs"
        tags.add(cancellation.tag)
        result = scheduler_pb2.CancellationResult(tag=cancellation.tag, found=True)
        pair.standby.send(cancellation_results=[result])
    await asyncio.gather(before, meanwhile)
    assert first.tag in tags


async def test_a_client_that_disconnects_without_a_leader(stack: Stack, pair: Pair) -> None:
    """Nothing is sent about its request, which may be another gateway's by then."""
    call = stack.inference.StreamGenerate(REQUEST)
    pair.leader.accept(await next_submission(pair.leader))
    await call.read()
    await pair.stop_leader()
    await stack.wait_for_status(NOT_SERVING)
    call.cancel()
    await until(stack.is_idle, "the end of the call")
    pair.promote_standby()
    stack.scheduler = pair.standby
    await stack.check_next_request()
    assert pair.standby.submissions.empty()
    assert pair.standby.cancellations.empty()
    assert pair.standby.detachments.empty()


async def test_a_failure_during_a_failover_is_passed_on(stack: Stack, pair: Pair) -> None:
    call = stack.inference.StreamGenerate(REQUEST)
    pair.leader.accept(await next_submission(pair.leader))
    await call.read()
    await pair.stop_leader()
    pair.promote_standby()
    pair.standby.fail(await next_submission(pair.standby), grpc.StatusCode.CANCELLED)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.CANCELLED


@pytest.mark.parametrize("reason", ["REDIS_AWAY", "LEAD_ENDS"])
async def test_transient_failures_are_retried(stack: Stack, reason: str) -> None:
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason=reason, domain="quire"))
    call = asyncio.ensure_future(stack.inference.Generate(pb.GenerateRequest(text="x")))
    for _ in range(2):
        submission = await next_submission(stack.scheduler)
        # Not accepted yet: a cancelled request of the same id must not match.
        assert not submission.again
        stack.scheduler.fail(submission, grpc.StatusCode.UNAVAILABLE, details=[detail])
    await stack.scheduler.serve_one(stack.encode("fox"))
    assert (await call).choices[0].text == "fox"


async def test_an_unaccepted_request_is_submitted_as_new(stack: Stack, pair: Pair) -> None:
    """A cancelled request may have the same id; its end must not be returned."""
    call = asyncio.ensure_future(stack.inference.Generate(pb.GenerateRequest(text="x")))
    await next_submission(pair.leader)
    await pair.stop_leader()
    pair.promote_standby()
    submission = await pair.standby.serve_one(stack.encode("fox"))
    assert not submission.again
    assert (await call).choices[0].text == "fox"


async def test_requests_move_when_a_leader_steps_down(stack: Stack, pair: Pair) -> None:
    call = asyncio.ensure_future(stack.inference.Generate(pb.GenerateRequest(text="x")))
    pair.leader.accept(await next_submission(pair.leader))
    pair.leader.leads = False
    pair.promote_standby()
    pair.leader.drop_stream()
    await pair.standby.serve_one(stack.encode("fox"))
    assert (await call).choices[0].text == "fox"


async def test_a_frame_of_an_older_epoch_is_dropped_and_ends_the_stream(
    stack: Stack, pair: Pair
) -> None:
    call = asyncio.ensure_future(stack.inference.Generate(pb.GenerateRequest(text="x")))
    submission = await next_submission(pair.leader)
    pair.leader.epoch -= 1
    pair.leader.fail(submission, grpc.StatusCode.INTERNAL)
    pair.standby.epoch = pair.leader.epoch + 2
    pair.standby.leads = True
    await pair.standby.serve_one(stack.encode("fox"))
    assert (await call).choices[0].text == "fox"
    assert not pair.leader.connected.is_set()


async def test_a_leader_of_an_older_epoch_is_not_followed(stack: Stack, pair: Pair) -> None:
    pair.leader.epoch -= 1
    pair.leader.drop_stream()
    await stack.wait_for_status(NOT_SERVING)
    seen = pair.leader.num_connects
    await until(lambda: pair.leader.num_connects > seen + 2, "further tries")
    pair.leader.epoch += 1
    await asyncio.wait_for(stack.wait_for_status(SERVING), 10)


@pytest.mark.slow
async def test_reconnects_back_off_when_streams_end_at_once(stack: Stack, pair: Pair) -> None:
    pair.leader.ends_streams = True
    pair.leader.drop_stream()
    before = pair.leader.num_connects
    await until(lambda: pair.leader.num_connects >= before + 4, "further tries")
    began, seen = time.monotonic(), pair.leader.num_connects
    await until(lambda: time.monotonic() > began + 1, "a second")
    assert pair.leader.num_connects <= seen + 4
    pair.leader.ends_streams = False
    await asyncio.wait_for(stack.wait_for_status(SERVING), 10)


async def test_an_inconsistent_frame_ends_the_stream_but_no_request(
    stack: Stack, pair: Pair
) -> None:
    call = asyncio.ensure_future(stack.inference.Generate(pb.GenerateRequest(text="x")))
    submission = await next_submission(pair.leader)
    torn = scheduler_pb2.TokenDeltas(attachments=[submission.attachment], token_ids=[1, 2])
    pair.leader.send(deltas=torn)
    await pair.leader.serve_one(stack.encode("fox"))
    assert (await call).choices[0].text == "fox"


async def test_a_leader_that_hangs_is_replaced(settings_for: Settings, pair: Pair) -> None:
    relay = Relay(pair.ports[0])
    addresses = f"127.0.0.1:{await relay.start()},127.0.0.1:{pair.ports[1]}"
    async with gateway_of(settings_for(scheduler=addresses), pair.leader) as stack:
        await asyncio.wait_for(stack.wait_for_status(SERVING), 10)
        call = asyncio.ensure_future(stack.inference.Generate(pb.GenerateRequest(text="x")))
        pair.leader.accept(await next_submission(pair.leader))
        relay.hold()
        # No other leader yet: the address that hangs is retried meanwhile.
        await asyncio.wait_for(stack.wait_for_status(NOT_SERVING), 10)
        seen = pair.standby.num_connects
        await until(lambda: pair.standby.num_connects > seen + 1, "tries")
        pair.promote_standby()
        await pair.standby.serve_one(stack.encode("fox"))
        assert (await call).choices[0].text == "fox"
    relay.stop()


@pytest.mark.slow
async def test_an_idle_stream_is_kept(settings_for: Settings, pair: Pair) -> None:
    """Keepalive pings that the server considers abusive would end the stream."""
    async with gateway_of(settings_for(scheduler=pair.addresses), pair.leader) as stack:
        await asyncio.wait_for(stack.wait_for_status(SERVING), 10)
        began = time.monotonic()
        seen = pair.leader.num_connects
        await until(lambda: time.monotonic() > began + 6, "six seconds", timeout_s=10)
        assert pair.leader.num_connects == seen
        await stack.check_next_request()


async def test_a_host_name_stands_for_its_addresses(settings_for: Settings) -> None:
    scheduler = FakeScheduler()
    port = await scheduler.start()
    settings = settings_for(scheduler=f"nowhere.invalid:1,localhost:{port}")
    async with gateway_of(settings, scheduler) as stack:
        await asyncio.wait_for(stack.wait_for_status(SERVING), 10)
        await stack.check_next_request()
    await scheduler.stop()


@pytest.mark.parametrize("was_accepted", [False, True])
async def test_waiting_for_a_scheduler_times_out(
    settings_for: Settings, pair: Pair, was_accepted: bool
) -> None:
    settings = settings_for(scheduler=pair.addresses, scheduler_wait_s=0.4)
    async with gateway_of(settings, pair.leader) as stack:
        await asyncio.wait_for(stack.wait_for_status(SERVING), 10)
        call = stack.inference.StreamGenerate(REQUEST)
        submission = await next_submission(pair.leader)
        if was_accepted:
            pair.leader.accept(submission)
            await call.read()
        await pair.stop_leader()
        await stack.wait_for_status(NOT_SERVING)
        cancel = stack.inference.CancelGenerate(pb.CancelGenerateRequest(request_id="a"))
        late = stack.inference.Generate(pb.GenerateRequest(text="x"))
        resumable = {"resumable": "true"} if was_accepted else {}
        for waiting, metadata in ((call.read(), resumable), (cancel, {}), (late, {})):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await waiting
            assert_unavailable_with_retry_delay(caught.value)
            assert info_of(caught.value).reason == "SCHEDULER_AWAY"
            assert info_of(caught.value).metadata == metadata
        await until(stack.is_idle, "the ends of the calls")


async def test_requests_wait_for_the_first_scheduler_and_its_limit(
    settings_for: Settings,
) -> None:
    scheduler = FakeScheduler()
    scheduler.leads = False
    port = await scheduler.start()
    async with gateway_of(settings_for(scheduler=f"127.0.0.1:{port}"), scheduler) as stack:
        call = asyncio.ensure_future(stack.inference.Generate(pb.GenerateRequest(text="x")))
        await until(lambda: stack.gateway.calls.num_live == 1, "the call")
        scheduler.leads = True
        submission = await scheduler.serve_one(stack.encode("fox"))
        assert submission.params.max_tokens == MAX_MODEL_LEN - len(submission.prompt_token_ids)
        assert (await call).choices[0].text == "fox"
    await scheduler.stop()


async def test_waiting_for_the_first_scheduler_times_out(settings_for: Settings) -> None:
    scheduler = FakeScheduler()
    settings = settings_for(scheduler="127.0.0.1:1", scheduler_wait_s=0.1)
    async with gateway_of(settings, scheduler) as stack:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.inference.Generate(pb.GenerateRequest(text="x"))
        assert_unavailable_with_retry_delay(caught.value)


def assert_unavailable_with_retry_delay(error: grpc.aio.AioRpcError) -> None:
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    details = rpc_status.from_call(error).details
    assert any(detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for detail in details)
