"""Unary and streaming generation, from the client's request to the scheduler and back."""

import asyncio
import hashlib

import grpc
import pytest
from gateway_fake_scheduler import MAX_MODEL_LEN, Delta, deltas
from gateway_stack import Stack
from gateway_tokenizers import EOS

from quire.internal.v1 import logits_pb2, scheduler_pb2
from quire.v1 import inference_pb2 as pb
from quire.v1.conversation_pb2 import Conversation, Message


def request(**parts: object) -> pb.StreamGenerateRequest:
    return pb.StreamGenerateRequest(**{"text": "The quick", **parts})


async def test_a_stream_from_acceptance_to_usage(stack: Stack) -> None:
    ids = stack.encode("brown fox")
    call = stack.inference.StreamGenerate(request(request_id="r1"))
    submission = await stack.scheduler.submissions.get()
    assert list(submission.prompt_token_ids) == stack.encode("The quick")
    params = submission.params
    room = MAX_MODEL_LEN - len(submission.prompt_token_ids)
    assert (params.temperature, params.max_tokens) == (1, room)
    assert (params.top_k, params.top_p, params.min_p) == (0, 1, 0)
    assert params.seed == int.from_bytes(hashlib.sha256(b"r1").digest()[:8], "big")
    assert list(params.stop_token_ids) == stack.encode(EOS)
    assert not submission.HasField("deadline_ms")

    stack.scheduler.accept(submission)
    stream = aiter(call)
    assert await anext(stream) == pb.StreamGenerateResponse(request_id="r1", model="tiny")
    stack.scheduler.write(submission, 0, ids[:2])
    first = await anext(stream)
    stack.scheduler.write(submission, 2, ids[2:])
    stack.scheduler.end(submission, len(ids), num_cached_prompt_tokens=1)
    rest = [response async for response in stream]
    parts = [first.deltas[0], *(response.deltas[0] for response in rest)]
    assert "".join(part.text for part in parts) == "brown fox"
    assert [id_ for part in parts for id_ in part.token_ids] == ids
    assert parts[1].first_token_index == 2
    assert [part.finish_reason for part in parts][-1] == pb.FINISH_REASON_LENGTH
    assert not first.HasField("usage")
    assert rest[-1].usage == pb.Usage(
        prompt_tokens=len(submission.prompt_token_ids),
        cached_prompt_tokens=1,
        completion_tokens=len(ids),
    )


async def test_generate_returns_one_response(stack: Stack) -> None:
    ids = stack.encode("brown" + EOS)
    call = stack.inference.Generate(pb.GenerateRequest(text="The"))
    submission = await stack.scheduler.submissions.get()
    stack.scheduler.accept(submission)
    stack.scheduler.write(submission, 0, ids)
    stack.scheduler.end(
        submission, len(ids), scheduler_pb2.END_REASON_STOP_TOKEN, stop_token_id=ids[-1]
    )
    response = await call
    assert len(response.request_id) == 32
    assert response.choices[0].text == "brown"
    assert list(response.choices[0].token_ids) == ids
    assert response.choices[0].finish_reason == pb.FINISH_REASON_STOP
    assert response.choices[0].stop_token_id == ids[-1]
    assert response.usage.completion_tokens == len(ids)


@pytest.mark.parametrize(
    ("speculation", "without_drafts"), [(None, False), (True, False), (False, True)]
)
async def test_a_request_may_be_without_drafts(
    stack: Stack, speculation: bool | None, without_drafts: bool
) -> None:
    params = pb.SamplingParams(speculation=speculation)
    call = stack.inference.Generate(pb.GenerateRequest(text="The", sampling_params=params))
    submission = await stack.scheduler.serve_one([3])
    await call
    assert submission.params.without_drafts == without_drafts


async def test_a_stop_token_of_the_request_has_no_text(stack: Stack) -> None:
    ids = stack.encode("ab!")
    params = pb.SamplingParams(stop_token_ids=ids[-1:], ignore_eos=True)
    call = stack.inference.Generate(pb.GenerateRequest(text="The", sampling_params=params))
    submission = await stack.scheduler.submissions.get()
    assert list(submission.params.stop_token_ids) == ids[-1:]
    stack.scheduler.write(submission, 0, ids)
    stack.scheduler.end(
        submission, len(ids), scheduler_pb2.END_REASON_STOP_TOKEN, stop_token_id=ids[-1]
    )
    assert (await call).choices[0].text == "ab"


async def test_a_stop_string_ends_the_choice_and_never_leaks(stack: Stack) -> None:
    ids = stack.encode("Größe STOP more text")
    params = pb.SamplingParams(stop=["STOP", "zzz"])
    call = stack.inference.StreamGenerate(request(sampling_params=params))
    submission = await stack.scheduler.submissions.get()
    stack.scheduler.accept(submission)
    for index, id_ in enumerate(ids):
        stack.scheduler.write(submission, index, [id_])
    finish = await stack.scheduler.finishes.get()
    model = stack.gateway.served.get(None)
    kept = model.vocabulary.decode(ids[: finish.num_tokens])
    assert "STOP" in kept
    assert "STOP" not in model.vocabulary.decode(ids[: finish.num_tokens - 1])
    stack.scheduler.end(submission, finish.num_tokens, scheduler_pb2.END_REASON_STOP_STRING)
    responses = [response async for response in call]
    parts = [delta for response in responses for delta in response.deltas]
    assert "".join(part.text for part in parts) == "Größe "
    assert [id_ for part in parts for id_ in part.token_ids] == ids[: finish.num_tokens]
    assert parts[-1].finish_reason == pb.FINISH_REASON_STOP
    assert parts[-1].stop_string == "STOP"
    assert responses[-1].usage.completion_tokens == finish.num_tokens


async def test_a_stop_string_in_the_last_tokens_takes_precedence_over_length(stack: Stack) -> None:
    ids = stack.encode("ab STOP")
    params = pb.SamplingParams(stop=["STOP"])
    call = stack.inference.Generate(pb.GenerateRequest(text="x", sampling_params=params))
    await stack.scheduler.serve_one(ids)
    choice = (await call).choices[0]
    assert (choice.text, choice.stop_string) == ("ab ", "STOP")


async def test_the_beginning_of_a_stop_string_is_emitted_at_the_end(stack: Stack) -> None:
    params = pb.SamplingParams(stop=["STOP"])
    call = stack.inference.Generate(pb.GenerateRequest(text="x", sampling_params=params))
    await stack.scheduler.serve_one(stack.encode("ab STO"))
    choice = (await call).choices[0]
    assert (choice.text, choice.finish_reason) == ("ab STO", pb.FINISH_REASON_LENGTH)


async def test_characters_of_several_tokens_are_never_split(stack: Stack) -> None:
    text = "🦊🐢 日本語 𐍈"
    ids = stack.encode(text)
    assert len(ids) > len(text)
    call = stack.inference.StreamGenerate(request())
    submission = await stack.scheduler.submissions.get()
    stack.scheduler.accept(submission)
    for index, id_ in enumerate(ids):
        stack.scheduler.write(submission, index, [id_])
    stack.scheduler.end(submission, len(ids))
    written = ""
    async for response in call:
        for delta in response.deltas:
            written += delta.text
            assert text.startswith(written)
    assert written == text


async def test_repeated_tokens_are_dropped_and_missing_ones_requested(stack: Stack) -> None:
    ids = stack.encode("abcdef")
    call = stack.inference.StreamGenerate(request())
    submission = await stack.scheduler.submissions.get()
    stack.scheduler.accept(submission)
    stack.scheduler.write(submission, 0, ids[:2])
    stack.scheduler.write(submission, 1, ids[1:3])
    responses = aiter(call)
    await anext(responses)
    written = ""
    while written != "abc":
        written += (await anext(responses)).deltas[0].text
    stack.scheduler.write(submission, 4, ids[4:])
    again = await stack.scheduler.submissions.get()
    assert again.attachment != submission.attachment
    assert (again.again, again.next_indices, again.digest) == (True, [3], submission.digest)
    stack.scheduler.accept(again)
    stack.scheduler.write(again, 3, ids[3:])
    stack.scheduler.end(again, len(ids))
    async for response in responses:
        written += response.deltas[0].text
    assert written == "abcdef"


@pytest.mark.parametrize("at_the_end", [False, True])
async def test_repeated_gaps_fail_the_request(stack: Stack, at_the_end: bool) -> None:
    call = stack.inference.StreamGenerate(request())
    for _ in range(4):
        submission = await stack.scheduler.submissions.get()
        stack.scheduler.accept(submission)
        if at_the_end:
            stack.scheduler.end(submission, 1)
        else:
            stack.scheduler.write(submission, 1, [5])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert caught.value.details() == "internal error"
    detachment = await stack.scheduler.detachments.get()
    assert detachment == scheduler_pb2.Detachment(attachment=submission.attachment)


async def test_sixty_four_requests_share_frames(stack: Stack) -> None:
    ids = stack.encode("The quick brown fox")
    calls = [stack.inference.Generate(pb.GenerateRequest(text="x")) for _ in range(64)]
    pending = [asyncio.ensure_future(call) for call in calls]
    submissions = [await stack.scheduler.submissions.get() for _ in calls]
    assert stack.scheduler.num_frames <= len(calls)
    for index, id_ in enumerate(ids):
        entries = (Delta(submission, index, [id_]) for submission in submissions)
        stack.scheduler.send(deltas=deltas(*entries))
    for submission in submissions:
        stack.scheduler.end(submission, len(ids))
    for response in await asyncio.gather(*pending):
        assert response.choices[0].text == "The quick brown fox"


async def test_a_conversation_is_rendered_with_the_template(stack: Stack) -> None:
    messages = [Message(role="user", content="hi"), Message(role="assistant", content="yo")]
    conversation = Conversation(messages=messages)
    call = stack.inference.Generate(pb.GenerateRequest(conversation=conversation))
    submission = await stack.scheduler.serve_one(stack.encode("ab"))
    rendered = "<s><|user|>hi\n<|assistant|>yo\n<|assistant|>\n"
    assert list(submission.prompt_token_ids) == stack.encode(rendered)
    assert (await call).choices[0].text == "ab"


async def test_salt_and_digest_are_sent(stack: Stack) -> None:
    async def submit(**parts: object) -> scheduler_pb2.Submission:
        call = stack.inference.Generate(pb.GenerateRequest(text="x", request_id="a", **parts))
        submission = await stack.scheduler.serve_one([3])
        await call
        return submission

    first, again, other = await submit(), await submit(), await submit(cache_salt="s")
    assert first.digest == again.digest != other.digest
    assert (first.cache_salt, other.cache_salt) == (b"", b"s")


async def test_changes_of_logits_are_sent_and_are_another_request(stack: Stack) -> None:
    async def submit(**params: object) -> scheduler_pb2.Submission:
        sampling = pb.SamplingParams(**params)
        call = stack.inference.Generate(
            pb.GenerateRequest(text="x", request_id="a", sampling_params=sampling)
        )
        submission = await stack.scheduler.serve_one([3])
        await call
        return submission

    neutral = await submit(
        presence_penalty=0, repetition_penalty=1, min_tokens=0, logit_bias={5: 0}
    )
    assert neutral.params.logits_params == b""
    digests = {neutral.digest}
    for params, changes in (
        ({"presence_penalty": 1}, {"presence_penalty": 1}),
        ({"logit_bias": {7: 2, 3: 1}}, {"bias_token_ids": [3, 7], "biases": [1, 2]}),
        (
            {"min_tokens": 2, "stop_token_ids": [9]},
            {"min_tokens": 2, "stop_token_ids": sorted([9, *stack.encode(EOS)])},
        ),
        ({"allowed_token_ids": pb.TokenIds(ids=[3])}, {"allowed_token_ids": [3]}),
    ):
        sent = await submit(**params)
        message = logits_pb2.LogitsParams.FromString(sent.params.logits_params)
        assert message == logits_pb2.LogitsParams(**changes)
        digests.add(sent.digest)
    assert len(digests) == 5
    # The order of a map's entries in a message is not fixed.
    assert (await submit(logit_bias={3: 1, 7: 2})).digest in digests


async def test_no_stop_string_ends_the_first_tokens_of_a_resumed_choice(stack: Stack) -> None:
    ids = stack.encode("ab ab ab")
    params = pb.SamplingParams(stop=["ab"], min_tokens=len(stack.encode("ab ")))
    call = stack.inference.StreamGenerate(request(request_id="m", sampling_params=params))
    submission = await stack.scheduler.submissions.get()
    stack.scheduler.accept(submission)
    stack.scheduler.write(submission, 0, ids[:1])
    await anext(aiter(call))
    call.cancel()
    resumed = stack.inference.ResumeGenerate(
        pb.ResumeGenerateRequest(request_id="m", next_token_indices=[1])
    )
    attachment = await stack.scheduler.attachments.get()
    stack.scheduler.accept(attachment, submission.opaque)
    stack.scheduler.write(attachment, 0, ids)
    finish = await stack.scheduler.finishes.get()
    assert stack.gateway.served.get(None).vocabulary.decode(ids[: finish.num_tokens]) == "ab ab"
    stack.scheduler.end(attachment, finish.num_tokens, scheduler_pb2.END_REASON_STOP_STRING)
    [*_, last] = [response async for response in resumed]
    assert last.deltas[0].stop_string == "ab"


async def test_the_priority_is_sent(stack: Stack) -> None:
    async def submit(**parts: object) -> scheduler_pb2.Submission:
        call = stack.inference.Generate(pb.GenerateRequest(text="x", **parts))
        submission = await stack.scheduler.serve_one([3])
        await call
        return submission

    assert not (await submit()).HasField("priority")
    for priority in (0, -(2**31), 2**31 - 1):
        submission = await submit(priority=priority)
        assert submission.HasField("priority")
        assert submission.priority == priority
