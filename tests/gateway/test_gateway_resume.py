"""Resumed streams, resume windows, and ids that are submitted again."""

import asyncio
from collections.abc import Callable, Sequence

import grpc
import pytest
from gateway_fake_scheduler import Delta, FakeScheduler, choice_end, deltas
from gateway_stack import Stack, info_of
from google.protobuf import any_pb2
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2
from waiting import until

from gateway_svc.generation.submission import request_digest
from gateway_svc.server import Gateway
from gateway_svc.settings import GatewaySettings
from quire.internal.v1 import gateway_pb2, scheduler_pb2
from quire.service.channels import channel_options
from quire.v1 import inference_pb2 as pb

REQUEST = pb.StreamGenerateRequest(text="The quick", request_id="mine")
TEXTS = ("Größe 🙂 STOP more", "日本語 STO", "ab")
PARAMS = pb.SamplingParams(n=3, stop=["STOP"], skip_special_tokens=False)


async def begun(stack: Stack, **parts: object) -> scheduler_pb2.Submission:
    """Submit a request and disconnect its client."""
    request = pb.StreamGenerateRequest()
    request.MergeFrom(REQUEST)
    request.MergeFrom(pb.StreamGenerateRequest(**parts))
    call = stack.inference.StreamGenerate(request)
    submission = await asyncio.wait_for(stack.scheduler.submissions.get(), 10)
    call.cancel()
    await until(stack.is_idle, "the end of the call")
    return submission


def resume(stack: Stack, *next_indices: int) -> grpc.aio.UnaryStreamCall:
    request = pb.ResumeGenerateRequest(request_id="mine", next_token_indices=next_indices)
    return stack.inference.ResumeGenerate(request)


async def all_of(call: grpc.aio.UnaryStreamCall) -> None:
    while await call.read() != grpc.aio.EOF:
        pass


async def attached(stack: Stack) -> scheduler_pb2.Attachment:
    return await asyncio.wait_for(stack.scheduler.attachments.get(), 10)


def replay(
    stack: Stack,
    attachment: scheduler_pb2.Attachment,
    opaque: bytes,
    ids: Sequence[Sequence[int]],
    ends: Sequence[int],
) -> None:
    """Send all of a request that has ended, in one frame."""
    entries = [Delta(attachment, 0, ids[choice], choice) for choice in range(len(ids))]
    stack.scheduler.accept(
        attachment,
        opaque,
        deltas=deltas(*entries),
        choice_ends=[
            choice_end(attachment, num_tokens, choice=choice)
            for choice, num_tokens in enumerate(ends)
        ],
    )


async def test_a_stream_is_resumed_at_its_clients_index(stack: Stack) -> None:
    submission = await begun(stack, sampling_params=PARAMS)
    ids = [stack.encode(text) for text in TEXTS]
    decode = stack.gateway.served.get(None).vocabulary.decode
    stop_at = next(k for k in range(len(ids[0])) if "STOP" in decode(ids[0][:k]))
    ends = [stop_at, len(ids[1]), len(ids[2])]
    whole = ["Größe 🙂 ", *TEXTS[1:]]
    texts: list[dict[int, str]] = [{}, {}, {}]
    # From before the first token to after the last one of each.
    for next_indices in zip(*(range(end, -1, -1) for end in ends), strict=False):
        call = resume(stack, *next_indices)
        attachment = await attached(stack)
        assert (attachment.request_id, list(attachment.next_indices)) == ("mine", [])
        replay(stack, attachment, submission.opaque, ids, ends)
        responses = [response async for response in call]
        assert responses[0] == pb.ResumeGenerateResponse(request_id="mine", model="tiny")
        parts = [delta for response in responses for delta in response.deltas]
        for choice in range(3):
            mine = [part for part in parts if part.index == choice]
            first = next_indices[choice]
            assert mine[0].first_token_index == first
            assert [id_ for p in mine for id_ in p.token_ids] == ids[choice][first : ends[choice]]
            assert mine[-1].finish_reason
            texts[choice][first] = "".join(part.text for part in mine)
        assert next(part for part in parts if part.stop_string).index == 0
        usage = responses[-1].usage
        assert usage.completion_tokens == sum(ends)
        assert usage.prompt_tokens == len(submission.prompt_token_ids)
    for choice in range(3):
        lengths = [len(text) for _, text in sorted(texts[choice].items())]
        assert lengths == sorted(lengths, reverse=True)
        assert all(whole[choice].endswith(text) for text in texts[choice].values())
    call = resume(stack)
    replay(stack, await attached(stack), submission.opaque, ids, ends)
    got = ["", "", ""]
    async for response in call:
        for part in response.deltas:
            got[part.index] += part.text
    assert got == whole


async def test_a_live_stream_is_taken_over_and_finished_at_its_stop_string(stack: Stack) -> None:
    submission = await begun(stack, sampling_params=PARAMS)
    ids = stack.encode(TEXTS[0])
    call = resume(stack, 2)
    attachment = await attached(stack)
    stack.scheduler.accept(
        attachment, submission.opaque, deltas=deltas(Delta(attachment, 0, ids[:3]))
    )
    stack.scheduler.write(attachment, 3, ids[3:])
    finish = await asyncio.wait_for(stack.scheduler.finishes.get(), 10)
    assert (finish.attachment, finish.choice) == (attachment.attachment, 0)
    call.cancel()
    for closed in (submission, attachment):
        cancellation = await asyncio.wait_for(stack.scheduler.cancellations.get(), 10)
        assert cancellation.attachment == closed.attachment


async def test_a_resumed_stream_survives_the_loss_of_the_connection(stack: Stack) -> None:
    submission = await begun(stack)
    ids = stack.encode("brown fox")
    call = resume(stack, 1)
    attachment = await attached(stack)
    stack.scheduler.accept(
        attachment, submission.opaque, deltas=deltas(Delta(attachment, 0, ids[:2]))
    )
    responses = aiter(call)
    await anext(responses)
    text = (await anext(responses)).deltas[0].text
    stack.scheduler.drop_stream()
    again = await attached(stack)
    assert list(again.next_indices) == [2]
    stack.scheduler.accept(again, submission.opaque)
    stack.scheduler.write(again, 2, ids[2:])
    stack.scheduler.end(again, len(ids))
    text += "".join([part.text async for r in responses for part in r.deltas])
    model = stack.gateway.served.get(None)
    assert model.vocabulary.decode(ids[:1]) + text == "brown fox"


async def test_a_long_replay_does_not_count_towards_the_bound(stack: Stack) -> None:
    submission = await begun(stack)
    [x] = stack.encode("x")
    count = 50_000
    call = resume(stack, 10)
    replay(stack, await attached(stack), submission.opaque, [[x] * count], [count])
    texts = [part.text async for r in call for part in r.deltas]
    assert "".join(texts) == "x" * (count - 10)
    # Split into chunks, so that other requests are served in between.
    assert len(texts) > 100


@pytest.mark.parametrize("reason", ["UNKNOWN_REQUEST", "TAKEN_OVER"])
async def test_errors_of_the_scheduler_are_passed_on(stack: Stack, reason: str) -> None:
    code = grpc.StatusCode.NOT_FOUND if reason == "UNKNOWN_REQUEST" else grpc.StatusCode.ABORTED
    metadata = {"resumable": "false" if reason == "UNKNOWN_REQUEST" else "true"}
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason=reason, domain="quire", metadata=metadata))
    call = resume(stack)
    stack.scheduler.fail(await attached(stack), code, details=[detail])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is code
    assert info_of(caught.value).metadata == metadata


@pytest.mark.parametrize(
    ("request_id", "next_indices", "field"),
    [
        ("", [], "request_id"),
        ("a" * 129, [], "request_id"),
        ("mine", [0] * 17, "next_token_indices"),
    ],
)
async def test_invalid_requests_are_refused_before_attaching(
    stack: Stack, request_id: str, next_indices: list[int], field: str
) -> None:
    request = pb.ResumeGenerateRequest(request_id=request_id, next_token_indices=next_indices)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.inference.ResumeGenerate(request).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert str(caught.value.details()).startswith(f"{field}: ")
    assert stack.scheduler.attachments.empty()


@pytest.mark.parametrize(
    ("next_indices", "field"), [([0, 0], "next_token_indices"), ([5], "next_token_indices[0]")]
)
async def test_wrong_indices_do_not_end_the_request(
    stack: Stack, next_indices: list[int], field: str
) -> None:
    submission = await begun(stack)
    call = resume(stack, *next_indices)
    attachment = await attached(stack)
    stack.scheduler.accept(attachment, submission.opaque)
    if len(next_indices) == 1:
        stack.scheduler.write(attachment, 0, stack.encode("ab"))
        stack.scheduler.end(attachment, len(stack.encode("ab")))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert str(caught.value.details()).startswith(f"{field}: ")
    if len(next_indices) > 1:
        detachment = await asyncio.wait_for(stack.scheduler.detachments.get(), 10)
        assert detachment == scheduler_pb2.Detachment(attachment=attachment.attachment)
    await stack.check_next_request()
    # Only that of the call that submitted it.
    assert stack.scheduler.cancellations.qsize() == 1


async def test_a_request_of_another_model_is_detached(stack: Stack) -> None:
    state = gateway_pb2.ResumeState(model="another", num_choices=1)
    call = resume(stack)
    attachment = await attached(stack)
    stack.scheduler.accept(attachment, state.SerializeToString())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert info_of(caught.value).reason == "UNKNOWN_MODEL"
    detachment = await asyncio.wait_for(stack.scheduler.detachments.get(), 10)
    assert not detachment.client_gone


async def test_a_malformed_state_is_an_internal_error(stack: Stack) -> None:
    call = resume(stack)
    stack.scheduler.accept(await attached(stack), b"\xff\xff")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.INTERNAL


@pytest.mark.parametrize("window_s", [None, 0, 60])
async def test_a_disconnected_client_may_resume_within_its_window(
    stack: Stack, window_s: int | None
) -> None:
    submission = await begun(stack, resume_window_s=window_s)
    assert submission.HasField("resume_window_s") == (window_s is not None)
    assert submission.resume_window_s == (window_s or 0)
    if window_s:
        detachment = await asyncio.wait_for(stack.scheduler.detachments.get(), 10)
        expected = scheduler_pb2.Detachment(attachment=submission.attachment, client_gone=True)
        assert detachment == expected
    else:
        cancellation = await asyncio.wait_for(stack.scheduler.cancellations.get(), 10)
        assert cancellation.attachment == submission.attachment
    # The same applies to a client that resumes it.
    call = resume(stack)
    attachment = await attached(stack)
    stack.scheduler.accept(attachment, submission.opaque)
    await call.read()
    call.cancel()
    parts = stack.scheduler.detachments if window_s else stack.scheduler.cancellations
    assert (await asyncio.wait_for(parts.get(), 10)).attachment == attachment.attachment


async def window_error(stack: Stack, window_s: int) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.inference.Generate(pb.GenerateRequest(text="x", resume_window_s=window_s))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return str(caught.value.details())


async def test_the_resume_window_is_bounded(stack: Stack) -> None:
    assert await window_error(stack, 61) == "resume_window_s: is 61; must be 0 to 60"
    await begun(stack, resume_window_s=60)


async def test_the_largest_resume_window_is_a_setting(
    stack: Stack, settings_for: Callable[..., GatewaySettings]
) -> None:
    gateway = Gateway(
        settings_for(scheduler=f"127.0.0.1:{stack.scheduler_port}", max_resume_window_s=5)
    )
    address = await gateway.start()
    async with grpc.aio.insecure_channel(address) as channel:
        other = Stack(gateway, stack.scheduler, stack.scheduler_port, address, channel)
        await other.wait_for_status(health_pb2.HealthCheckResponse.SERVING)
        assert (await window_error(other, 6)).endswith("0 to 5")
    await gateway.stop()


def test_the_same_request_has_the_same_digest() -> None:
    parts = {"text": "x", "request_id": "a", "sampling_params": pb.SamplingParams(n=2)}
    digests = {
        request_digest(request)
        for request in (
            pb.GenerateRequest(**parts),
            pb.StreamGenerateRequest(**parts),
            pb.GenerateRequest(**parts, resume_window_s=0),
            pb.GenerateRequest(**parts, resume_window_s=60),
        )
    }
    assert len(digests) == 1
    assert request_digest(pb.GenerateRequest(**parts, priority=0)) not in digests


async def test_an_id_submitted_again_goes_to_the_newer_call(stack: Stack) -> None:
    detail = any_pb2.Any()
    detail.Pack(
        error_details_pb2.ErrorInfo(
            reason="TAKEN_OVER", domain="quire", metadata={"resumable": "true"}
        )
    )
    ids = stack.encode("fox")
    older = stack.inference.StreamGenerate(REQUEST)
    first = await stack.scheduler.submissions.get()
    stack.scheduler.accept(first)
    stack.scheduler.write(first, 0, ids[:1])
    await older.read()
    newer = asyncio.ensure_future(
        stack.inference.Generate(pb.GenerateRequest(text="The quick", request_id="mine"))
    )
    second = await stack.scheduler.submissions.get()
    assert (second.digest, second.again, second.next_indices) == (first.digest, False, [0])
    stack.scheduler.fail(first, grpc.StatusCode.ABORTED, details=[detail])
    stack.scheduler.accept(second, first.opaque, deltas=deltas(Delta(second, 0, ids)))
    stack.scheduler.end(second, len(ids))
    assert (await newer).choices[0].text == "fox"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await all_of(older)
    assert caught.value.code() is grpc.StatusCode.ABORTED
    assert info_of(caught.value).metadata == {"resumable": "true"}
    await stack.check_next_request()
    assert stack.scheduler.cancellations.empty()


async def test_a_stopping_gateway_detaches_its_streams(
    settings_for: Callable[..., GatewaySettings],
) -> None:
    scheduler = FakeScheduler()
    port = await scheduler.start()
    gateway = Gateway(settings_for(scheduler=f"127.0.0.1:{port}"))
    address = await gateway.start()
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        stack = Stack(gateway, scheduler, port, address, channel)
        await asyncio.wait_for(stack.wait_for_status(health_pb2.HealthCheckResponse.SERVING), 10)
        stream = stack.inference.StreamGenerate(REQUEST)
        unary = asyncio.ensure_future(stack.inference.Generate(pb.GenerateRequest(text="x")))
        submissions = [await scheduler.submissions.get() for _ in range(2)]
        for submission in submissions:
            scheduler.accept(submission)
        await stream.read()
        await gateway.stop()
        for waiting in (stream.read(), unary):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await waiting
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert info_of(caught.value).metadata == {"resumable": "true"}
    detached = [await asyncio.wait_for(scheduler.detachments.get(), 10) for _ in submissions]
    assert [d.attachment for d in detached] == [s.attachment for s in submissions]
    assert not any(d.client_gone for d in detached)
    assert scheduler.cancellations.empty()
    await scheduler.stop()
