import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest
from gateway_fake_scheduler import MAX_MODEL_LEN
from gateway_stack import Stack, info_of
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2
from grpc_status import rpc_status
from waiting import until

from gateway_svc.settings import GatewaySettings
from quire.internal.v1 import scheduler_pb2
from quire.service.channels import INTERNAL_MESSAGE_BYTES, channel_options
from quire.service.protocol import PROTOCOL_VERSION
from quire.v1 import inference_pb2 as pb
from quire.v1 import inference_pb2_grpc

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
REQUEST = pb.StreamGenerateRequest(text="The quick", request_id="mine")


async def cancelled(stack: Stack, submission: scheduler_pb2.Submission) -> None:
    cancellation = await asyncio.wait_for(stack.scheduler.cancellations.get(), 5)
    assert cancellation.attachment == submission.attachment
    assert not cancellation.HasField("tag")


@pytest.mark.parametrize("accepted", [False, True])
async def test_a_client_that_cancels(stack: Stack, accepted: bool) -> None:
    call = stack.inference.StreamGenerate(REQUEST)
    submission = await stack.scheduler.submissions.get()
    if accepted:
        stack.scheduler.accept(submission)
        await call.read()
    call.cancel()
    await cancelled(stack, submission)


async def test_a_client_that_disconnects(stack: Stack) -> None:
    channel = grpc.aio.insecure_channel(stack.address, options=channel_options())
    call = inference_pb2_grpc.InferenceServiceStub(channel).StreamGenerate(REQUEST)
    submission = await stack.scheduler.submissions.get()
    stack.scheduler.accept(submission)
    await call.read()
    await channel.close()
    await cancelled(stack, submission)


@pytest.mark.parametrize("accepted", [False, True])
async def test_a_deadline_that_passes(stack: Stack, accepted: bool) -> None:
    call = stack.inference.StreamGenerate(REQUEST, timeout=0.3)
    submission = await stack.scheduler.submissions.get()
    assert submission.HasField("deadline_ms")
    if accepted:
        stack.scheduler.accept(submission)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await cancelled(stack, submission)


async def test_cancel_by_id(stack: Stack) -> None:
    call = stack.inference.StreamGenerate(REQUEST)
    submission = await stack.scheduler.submissions.get()
    cancel = asyncio.ensure_future(
        stack.inference.CancelGenerate(pb.CancelGenerateRequest(request_id="mine"))
    )
    cancellation = await stack.scheduler.cancellations.get()
    assert cancellation.request.request_id == "mine"
    result = scheduler_pb2.CancellationResult(tag=cancellation.tag, found=True)
    stack.scheduler.say(cancellation_results=[result])
    stack.scheduler.fail(submission, grpc.StatusCode.CANCELLED)
    assert await cancel == pb.CancelGenerateResponse()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.CANCELLED


@pytest.mark.parametrize("is_live_elsewhere", [False, True])
async def test_cancel_by_id_before_the_scheduler_has_heard_of_it(
    stack: Stack, is_live_elsewhere: bool
) -> None:
    with all_threads_busy(stack):
        call = stack.inference.StreamGenerate(REQUEST)
        await until(lambda: stack.gateway.calls.num_live == 1, "the request is in preparation")
        cancel = asyncio.ensure_future(
            stack.inference.CancelGenerate(pb.CancelGenerateRequest(request_id="mine"))
        )
        tag = (await asyncio.wait_for(stack.scheduler.cancellations.get(), 10)).tag
        result = scheduler_pb2.CancellationResult(tag=tag, found=is_live_elsewhere)
        stack.scheduler.say(cancellation_results=[result])
        assert await cancel == pb.CancelGenerateResponse()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.CANCELLED
    await stack.the_next_request_works()
    assert stack.scheduler.submissions.empty()


@contextmanager
def all_threads_busy(stack: Stack) -> Iterator[None]:
    """No text is tokenized meanwhile."""
    go_on = threading.Event()
    threads = stack.gateway.served.named(None).threads
    for _ in range(GatewaySettings.model_fields["tokenizer_threads"].default):
        threads.submit(go_on.wait)
    try:
        yield
    finally:
        go_on.set()


async def test_a_frame_that_is_too_large_costs_the_link_but_no_request(stack: Stack) -> None:
    call = stack.inference.Generate(pb.GenerateRequest(text="x"))
    await stack.scheduler.submissions.get()
    stack.scheduler.say(
        deltas=scheduler_pb2.TokenDeltas(token_ids=[2**31] * (INTERNAL_MESSAGE_BYTES // 5))
    )
    await stack.scheduler.serve_one(stack.encode("fox"))
    assert (await call).choices[0].text == "fox"


async def test_cancel_of_an_unknown_id(stack: Stack) -> None:
    cancel = asyncio.ensure_future(
        stack.inference.CancelGenerate(pb.CancelGenerateRequest(request_id="nobody"))
    )
    tag = (await stack.scheduler.cancellations.get()).tag
    stack.scheduler.say(cancellation_results=[scheduler_pb2.CancellationResult(tag=tag)])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cancel
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_failures_pass_through_with_their_details(stack: Stack) -> None:
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason="REQUEST_EXISTS", domain="quire"))
    call = stack.inference.StreamGenerate(REQUEST)
    submission = await stack.scheduler.submissions.get()
    stack.scheduler.fail(submission, grpc.StatusCode.ALREADY_EXISTS, details=[detail])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    status = rpc_status.from_call(caught.value)
    assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
    assert (status.message, list(status.details)) == ("no", [detail])


async def test_a_full_queue_tells_when_to_come_again(stack: Stack) -> None:
    details = [any_pb2.Any(), any_pb2.Any()]
    details[0].Pack(error_details_pb2.ErrorInfo(reason="QUEUE_FULL", domain="quire"))
    delay = duration_pb2.Duration(seconds=2, nanos=500_000_000)
    details[1].Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    call = stack.inference.Generate(pb.GenerateRequest(text="The quick"))
    submission = await stack.scheduler.submissions.get()
    stack.scheduler.fail(submission, grpc.StatusCode.RESOURCE_EXHAUSTED, details=details)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    status = rpc_status.from_call(caught.value)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert list(status.details) == details
    await stack.the_next_request_works()
    assert stack.scheduler.cancellations.empty()


async def test_a_client_that_does_not_read(stack: Stack) -> None:
    # A window that stays small, for the gateway's writes to wait soon.
    options = [*channel_options(), ("grpc.http2.bdp_probe", 0)]
    async with grpc.aio.insecure_channel(stack.address, options=options) as channel:
        slow = inference_pb2_grpc.InferenceServiceStub(channel).StreamGenerate(REQUEST)
        submission = await stack.scheduler.submissions.get()
        stack.scheduler.accept(submission)
        first = 0
        while stack.scheduler.detachments.empty():
            stack.scheduler.write(submission, first, [5] * 500)
            first += 500
            # Another request's answer tells that the gateway has read this frame.
            await stack.the_next_request_works()
        detachment = await stack.scheduler.detachments.get()
        assert detachment == scheduler_pb2.Detachment(attachment=submission.attachment)
        received = 0

        async def read_all() -> None:
            nonlocal received
            async for response in slow:
                received += response.ByteSize()

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert info_of(caught.value).metadata == {"resumable": "true"}
    # What was written before the window was full.
    assert received > 50_000


async def test_ready_follows_the_scheduler(stack: Stack) -> None:
    seen = asyncio.Queue[int]()

    async def watch() -> None:
        async for answer in stack.health.Watch(health_pb2.HealthCheckRequest(service="ready")):
            seen.put_nowait(answer.status)

    watching = asyncio.create_task(watch())
    assert await seen.get() == SERVING
    for ready, status in ((False, NOT_SERVING), (True, SERVING), (False, NOT_SERVING)):
        hello = scheduler_pb2.SchedulerHello(protocol_version=PROTOCOL_VERSION, ready=ready)
        stack.scheduler.say(hello=hello)
        assert await seen.get() == status
    watching.cancel()
    answer = await stack.health.Check(health_pb2.HealthCheckRequest())
    assert answer.status == SERVING


async def test_the_limit_is_what_a_scheduler_said_last(stack: Stack) -> None:
    assert stack.gateway.link.max_model_len == MAX_MODEL_LEN
    for told, expected in ((None, MAX_MODEL_LEN), (MAX_MODEL_LEN // 2, MAX_MODEL_LEN // 2)):
        hello = scheduler_pb2.SchedulerHello(protocol_version=PROTOCOL_VERSION, max_model_len=told)
        stack.scheduler.say(hello=hello)
        await stack.the_next_request_works()
        assert stack.gateway.link.max_model_len == expected
