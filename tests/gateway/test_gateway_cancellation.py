"""Cancellation, deadlines, slow clients, bad frames and health, seen by client and scheduler."""

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
from quire.service.protocol_version import PROTOCOL_VERSION
from quire.v1 import inference_pb2 as pb
from quire.v1 import inference_pb2_grpc

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
REQUEST = pb.StreamGenerateRequest(text="The quick", request_id="mine")


async def assert_cancelled(stack: Stack, submission: scheduler_pb2.Submission) -> None:
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
    await assert_cancelled(stack, submission)


async def test_a_client_that_disconnects(stack: Stack) -> None:
    channel = grpc.aio.insecure_channel(stack.address, options=channel_options())
    call = inference_pb2_grpc.InferenceServiceStub(channel).StreamGenerate(REQUEST)
    submission = await stack.scheduler.submissions.get()
    stack.scheduler.accept(submission)
    await call.read()
    await channel.close()
    await assert_cancelled(stack, submission)


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
    await assert_cancelled(stack, submission)


async def test_cancel_by_id(stack: Stack) -> None:
    call = stack.inference.StreamGenerate(REQUEST)
    submission = await stack.scheduler.submissions.get()
    cancel = asyncio.ensure_future(
        stack.inference.CancelGenerate(pb.CancelGenerateRequest(request_id="mine"))
    )
    cancellation = await stack.scheduler.cancellations.get()
    assert cancellation.request.request_id == "mine"
    result = scheduler_pb2.CancellationResult(tag=cancellation.tag, found=True)
    stack.scheduler.send(cancellation_results=[result])
    stack.scheduler.fail(submission, grpc.StatusCode.CANCELLED)
    assert await cancel == pb.CancelGenerateResponse()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.CANCELLED


@pytest.mark.parametrize("is_live_elsewhere", [False, True])
async def test_cancel_by_id_during_preparation(stack: Stack, is_live_elsewhere: bool) -> None:
    with all_threads_busy(stack):
        call = stack.inference.StreamGenerate(REQUEST)
        await until(lambda: stack.gateway.calls.num_live == 1, "the request is in preparation")
        cancel = asyncio.ensure_future(
            stack.inference.CancelGenerate(pb.CancelGenerateRequest(request_id="mine"))
        )
        tag = (await asyncio.wait_for(stack.scheduler.cancellations.get(), 10)).tag
        result = scheduler_pb2.CancellationResult(tag=tag, found=is_live_elsewhere)
        stack.scheduler.send(cancellation_results=[result])
        assert await cancel == pb.CancelGenerateResponse()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.CANCELLED
    await stack.check_next_request()
    assert stack.scheduler.submissions.empty()


@contextmanager
def all_threads_busy(stack: Stack) -> Iterator[None]:
    """No text is tokenized during the block."""
    released = threading.Event()
    threads = stack.gateway.served.get(None).threads
    for _ in range(GatewaySettings.model_fields["tokenizer_threads"].default):
        threads.submit(released.wait)
    try:
        yield
    finally:
        released.set()


async def test_a_frame_that_is_too_large_ends_the_connection_but_no_request(stack: Stack) -> None:
    call = stack.inference.Generate(pb.GenerateRequest(text="x"))
    await stack.scheduler.submissions.get()
    stack.scheduler.send(
        deltas=scheduler_pb2.TokenDeltas(token_ids=[2**31] * (INTERNAL_MESSAGE_BYTES // 5))
    )
    await stack.scheduler.serve_one(stack.encode("fox"))
    assert (await call).choices[0].text == "fox"


async def test_cancel_of_an_unknown_id(stack: Stack) -> None:
    cancel = asyncio.ensure_future(
        stack.inference.CancelGenerate(pb.CancelGenerateRequest(request_id="unknown"))
    )
    tag = (await stack.scheduler.cancellations.get()).tag
    stack.scheduler.send(cancellation_results=[scheduler_pb2.CancellationResult(tag=tag)])
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


async def test_a_full_queue_passes_on_the_retry_delay(stack: Stack) -> None:
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
    await stack.check_next_request()
    assert stack.scheduler.cancellations.empty()


async def test_a_client_that_does_not_read(stack: Stack) -> None:
    # A window that stays small, so that the gateway's writes soon block.
    options = [*channel_options(), ("grpc.http2.bdp_probe", 0)]
    async with grpc.aio.insecure_channel(stack.address, options=options) as channel:
        slow = inference_pb2_grpc.InferenceServiceStub(channel).StreamGenerate(REQUEST)
        submission = await stack.scheduler.submissions.get()
        stack.scheduler.accept(submission)
        first = 0
        while stack.scheduler.detachments.empty():
            stack.scheduler.write(submission, first, [5] * 500)
            first += 500
            # Another request's response shows that the gateway has read this frame.
            await stack.check_next_request()
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
    # Written before the window was full.
    assert received > 50_000


async def test_ready_follows_the_scheduler(stack: Stack) -> None:
    seen = asyncio.Queue[int]()

    async def watch() -> None:
        async for response in stack.health.Watch(health_pb2.HealthCheckRequest(service="ready")):
            seen.put_nowait(response.status)

    watching = asyncio.create_task(watch())
    assert await seen.get() == SERVING
    for ready, status in ((False, NOT_SERVING), (True, SERVING), (False, NOT_SERVING)):
        hello = scheduler_pb2.SchedulerHello(protocol_version=PROTOCOL_VERSION, ready=ready)
        stack.scheduler.send(hello=hello)
        assert await seen.get() == status
    watching.cancel()
    response = await stack.health.Check(health_pb2.HealthCheckRequest())
    assert response.status == SERVING


async def test_max_model_len_is_as_last_reported(stack: Stack) -> None:
    assert stack.gateway.scheduler.max_model_len == MAX_MODEL_LEN
    for reported, expected in ((None, MAX_MODEL_LEN), (MAX_MODEL_LEN // 2, MAX_MODEL_LEN // 2)):
        hello = scheduler_pb2.SchedulerHello(
            protocol_version=PROTOCOL_VERSION, max_model_len=reported
        )
        stack.scheduler.send(hello=hello)
        await stack.check_next_request()
        assert stack.gateway.scheduler.max_model_len == expected
