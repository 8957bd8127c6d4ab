"""Prompts cut to their last tokens, and output without text."""

import grpc
import pytest
from gateway_fake_scheduler import MAX_MODEL_LEN
from gateway_stack import Stack, field_of

from gateway_svc.generation.truncation import num_kept_tokens
from quire.v1 import inference_pb2 as pb
from quire.v1.conversation_pb2 import Conversation, Message


@pytest.mark.parametrize(
    ("num_tokens", "params", "kept"),
    [
        (10, {}, 10),
        (10, {"truncate_prompt_tokens": 3}, 3),
        (10, {"truncate_prompt_tokens": 10}, 10),
        (10, {"truncate_prompt_tokens": 63, "max_tokens": 60}, 10),
        # More than the context has: what leaves room for the output.
        (100, {"truncate_prompt_tokens": 64}, 63),
        (100, {"truncate_prompt_tokens": 2**32 - 1}, 63),
        (100, {"truncate_prompt_tokens": 2**32 - 1, "max_tokens": 60}, 4),
        (100, {"truncate_prompt_tokens": 2**32 - 1, "max_tokens": 64}, 1),
        (100, {"truncate_prompt_tokens": 2**32 - 1, "max_tokens": 1000}, 1),
        (2, {"truncate_prompt_tokens": 2**32 - 1, "max_tokens": 60}, 2),
    ],
)
def test_the_number_of_kept_tokens(num_tokens: int, params: dict[str, int], kept: int) -> None:
    assert num_kept_tokens(num_tokens, pb.SamplingParams(**params), 64) == kept


def conversation(text: str) -> Conversation:
    return Conversation(messages=[Message(role="user", content=text)])


@pytest.mark.parametrize("kind", ["text", "token_ids", "conversation"])
async def test_the_last_tokens_of_too_long_a_prompt_are_used(stack: Stack, kind: str) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 8
    ids = stack.encode(text)
    assert len(ids) > MAX_MODEL_LEN
    prompts = {
        "text": {"text": text},
        "token_ids": {"token_ids": pb.TokenIds(ids=ids)},
        "conversation": {"conversation": conversation(text)},
    }
    if kind == "conversation":
        ids = stack.encode(f"<s><|user|>{text}\n<|assistant|>\n")
    params = pb.SamplingParams(truncate_prompt_tokens=5, prompt_logprobs=0)
    call = stack.inference.Generate(pb.GenerateRequest(sampling_params=params, **prompts[kind]))
    submission = await stack.scheduler.submissions.get()
    assert list(submission.prompt_token_ids) == ids[-5:]
    assert submission.params.max_tokens == MAX_MODEL_LEN - 5
    call.cancel()


async def test_usage_and_context_are_those_of_the_kept_tokens(stack: Stack) -> None:
    params = pb.SamplingParams(truncate_prompt_tokens=2)
    request = pb.GenerateRequest(text="The quick brown fox", sampling_params=params)
    call = stack.inference.Generate(request)
    await stack.scheduler.serve_one(stack.encode(" jumps"))
    response = await call
    assert response.usage.prompt_tokens == 2
    assert response.choices[0].text == " jumps"


async def test_truncation_to_no_tokens_is_refused(stack: Stack) -> None:
    params = pb.SamplingParams(truncate_prompt_tokens=0)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.inference.Generate(pb.GenerateRequest(text="a", sampling_params=params))
    assert field_of(caught.value) == "sampling_params.truncate_prompt_tokens"


async def test_other_truncation_is_another_request(stack: Stack) -> None:
    async def digest(**params: int) -> bytes:
        sampling = pb.SamplingParams(**params)
        call = stack.inference.Generate(pb.GenerateRequest(text="a", sampling_params=sampling))
        submission = await stack.scheduler.serve_one([5])
        await call
        return submission.digest

    assert await digest() != await digest(truncate_prompt_tokens=9)


@pytest.mark.parametrize("streams", [False, True])
async def test_output_without_text_has_its_tokens(stack: Stack, streams: bool) -> None:
    ids = stack.encode("brown fox")
    params = pb.SamplingParams(detokenize=False)
    if streams:
        call = stack.inference.StreamGenerate(
            pb.StreamGenerateRequest(text="a", sampling_params=params)
        )
        await stack.scheduler.serve_one(ids)
        found = [delta async for response in call for delta in response.deltas]
    else:
        unary = stack.inference.Generate(pb.GenerateRequest(text="a", sampling_params=params))
        await stack.scheduler.serve_one(ids)
        found = list((await unary).choices)
    assert [token_id for one in found for token_id in one.token_ids] == ids
    assert not any(one.text for one in found)
    assert found[-1].finish_reason == pb.FINISH_REASON_LENGTH


async def test_stop_strings_need_text(stack: Stack) -> None:
    params = pb.SamplingParams(detokenize=False, stop=["a"])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.inference.Generate(pb.GenerateRequest(text="a", sampling_params=params))
    assert field_of(caught.value) == "sampling_params.stop"
