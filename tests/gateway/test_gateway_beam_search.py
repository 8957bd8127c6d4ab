"""Beam searches over gRPC and HTTP: what is submitted, what comes of the log, what is refused."""

import asyncio
from typing import Any

import grpc
import pytest
from gateway_fake_scheduler import FakeScheduler, StreamRequest
from gateway_stack import Stack, field_of, info_of
from http_client import Http

from quire.internal.v1 import gateway_pb2, scheduler_pb2
from quire.service.beams import BeamStep, Continuation
from quire.v1 import beam_search_pb2 as pb
from quire.v1 import conversation_pb2, inference_pb2

INVALID = grpc.StatusCode.INVALID_ARGUMENT


def steps_of(texts: tuple[list[int], list[int]]) -> list[BeamStep]:
    """A search of two beams whose tokens are these; the first is the more likely one."""
    length = len(texts[0])
    steps = []
    for at in range(length):
        both = tuple(
            Continuation(min(at, 1) * choice, tokens[at], -(at + 1.0) - choice)
            for choice, tokens in enumerate(texts)
        )
        steps.append(BeamStep((), both) if at + 1 == length else BeamStep(both, ()))
    return steps


def serve(scheduler: FakeScheduler, wanted: StreamRequest, steps: list[BeamStep]) -> None:
    scheduler.send(
        deltas=scheduler_pb2.TokenDeltas(
            attachments=[wanted.attachment],
            choices=[0],
            first_indices=[0],
            token_ids=[step.token_id for step in steps],
            num_tokens=[len(steps)],
            num_logprobs=[4],
            logprobs=b"".join(step.pack(2) for step in steps),
        )
    )
    scheduler.end(wanted, len(steps))


def two_texts(stack: Stack) -> tuple[list[int], list[int]]:
    first, second = stack.encode("brown fox"), stack.encode("fox brown")
    length = min(len(first), len(second))
    return first[:length], second[:length]


async def test_the_sequences_of_a_search_are_those_of_its_log(stack: Stack) -> None:
    params = pb.BeamSearchParams(beam_width=2, max_tokens=9, length_penalty=2.0)
    call = stack.beam_search.BeamSearch(pb.BeamSearchRequest(text="The", params=params))
    submission = await stack.scheduler.submissions.get()
    assert submission.n == 1
    assert submission.deferred_delivery
    resolved = submission.params
    assert (resolved.beam_width, resolved.length_penalty) == (2, 2.0)
    assert resolved.early_stopping == scheduler_pb2.EARLY_STOPPING_HEURISTIC
    assert resolved.num_logprobs == 1 + 2 + len(resolved.stop_token_ids)
    assert resolved.without_drafts
    assert resolved.temperature == 0
    texts = two_texts(stack)
    stack.scheduler.accept(submission)
    serve(stack.scheduler, submission, steps_of(texts))
    response = await call
    assert [list(one.token_ids) for one in response.sequences] == list(texts)
    length = len(texts[0])
    assert [one.cumulative_logprob for one in response.sequences] == [-length, -length - 1]
    assert response.sequences[0].score == pytest.approx(-length / length**2)
    assert {one.finish_reason for one in response.sequences} == {inference_pb2.FINISH_REASON_LENGTH}
    assert response.sequences[0].text.strip().startswith("brown")
    assert response.usage.completion_tokens == 2 * length
    assert list(response.prompt_token_ids) == list(submission.prompt_token_ids)


async def test_a_search_has_defaults(stack: Stack) -> None:
    call = stack.beam_search.BeamSearch(pb.BeamSearchRequest(text="The"))
    submission = await stack.scheduler.submissions.get()
    assert submission.params.beam_width == 4
    assert submission.params.length_penalty == 1
    assert submission.params.max_tokens > 1
    call.cancel()


async def test_another_gateway_can_stream_a_search(stack: Stack) -> None:
    state = gateway_pb2.ResumeState(
        model=stack.gateway.served.get(None).name,
        num_choices=2,
        search=gateway_pb2.SearchState(beam_width=2, length_penalty=1.0),
    )
    resume = inference_pb2.ResumeGenerateRequest(request_id="a", next_token_indices=[1])
    call = stack.inference.ResumeGenerate(resume)
    attachment = await stack.scheduler.attachments.get()
    stack.scheduler.accept(attachment, state.SerializeToString())
    texts = two_texts(stack)
    serve(stack.scheduler, attachment, steps_of(texts))
    responses = [response async for response in call]
    found = [delta for response in responses for delta in response.deltas]
    assert [list(delta.token_ids) for delta in found] == [texts[0][1:], texts[1]]


@pytest.mark.parametrize(
    ("params", "field", "reason"),
    [
        ({"beam_width": 0}, "params.beam_width", "BEAM_WIDTH_OUT_OF_RANGE"),
        ({"beam_width": 17}, "params.beam_width", "BEAM_WIDTH_OUT_OF_RANGE"),
        ({"length_penalty": 11}, "params.length_penalty", "LENGTH_PENALTY_OUT_OF_RANGE"),
        ({"length_penalty": float("nan")}, "params.length_penalty", "LENGTH_PENALTY_OUT_OF_RANGE"),
        ({"early_stopping": 9}, "params.early_stopping", "EARLY_STOPPING_OUT_OF_RANGE"),
        ({"max_tokens": 0}, "params.max_tokens", "MAX_TOKENS_OUT_OF_RANGE"),
        ({"beam_width": 16, "stop_token_ids": range(17)}, "params.beam_width",
         "TOO_MANY_CANDIDATES"),
        ({"stop_token_ids": [10**6]}, "params.stop_token_ids[0]", "TOKEN_ID_OUTSIDE_VOCABULARY"),
    ],
)  # fmt: skip
async def test_invalid_parameters_are_refused(
    stack: Stack, params: dict[str, Any], field: str, reason: str
) -> None:
    request = pb.BeamSearchRequest(text="The", params=pb.BeamSearchParams(**params))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.beam_search.BeamSearch(request)
    assert caught.value.code() is INVALID
    assert field_of(caught.value) == field
    assert info_of(caught.value).reason == reason


async def test_the_default_of_max_tokens_is_as_many_as_a_response_holds(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway_svc.generation.beam_search.MAX_LOGPROBS", 20)
    params = pb.BeamSearchParams(beam_width=2)
    call = stack.beam_search.BeamSearch(pb.BeamSearchRequest(text="The", params=params))
    submission = await stack.scheduler.submissions.get()
    assert submission.params.max_tokens == 5
    call.cancel()
    params.max_tokens = 6
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.beam_search.BeamSearch(pb.BeamSearchRequest(text="The", params=params))
    assert info_of(caught.value).reason == "TOO_MANY_TOKENS"
    assert "is 6; with 2 beams at most 5 is allowed" in str(caught.value.details())


async def test_a_search_has_no_tools_and_needs_a_prompt(stack: Stack) -> None:
    tools = [conversation_pb2.Tool(name="x")]
    messages = [conversation_pb2.Message(role="user", content="x")]
    conversation = conversation_pb2.Conversation(messages=messages, tools=tools)
    for request, field in (
        (pb.BeamSearchRequest(conversation=conversation), "conversation"),
        (pb.BeamSearchRequest(), "text"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.beam_search.BeamSearch(request)
        assert caught.value.code() is INVALID
        assert field_of(caught.value).startswith(field)


@pytest.mark.parametrize("http_listen", ["127.0.0.1:0"], indirect=True)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_http_returns_the_beams_as_choices(stack: Stack, http: Http, is_stream: bool) -> None:
    body = {"prompt": "The", "use_beam_search": True, "n": 2, "length_penalty": 0.5,
            "early_stopping": "never", "max_tokens": 9, "temperature": 0}  # fmt: skip
    texts = two_texts(stack)
    if is_stream:
        started = asyncio.create_task(_choices_of_stream(http, body))
    else:
        started = http.start("/v1/completions", body)
    submission = await stack.scheduler.submissions.get()
    assert submission.params.early_stopping == scheduler_pb2.EARLY_STOPPING_NEVER
    assert submission.params.length_penalty == 0.5
    stack.scheduler.accept(submission)
    serve(stack.scheduler, submission, steps_of(texts))
    result = await started
    if not is_stream:
        result = {one["index"]: one["text"] for one in result.json()["choices"]}
    assert sorted(result) == [0, 1]
    assert result[0].strip().startswith("brown")


async def _choices_of_stream(http: Http, body: dict[str, Any]) -> dict[int, str]:
    texts: dict[int, str] = {}
    async with http.stream("/v1/completions", {**body, "stream": True}) as events:
        for event in await events.rest():
            for choice in event.json()["choices"] if event.data.startswith("{") else ():
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


@pytest.mark.parametrize("http_listen", ["127.0.0.1:0"], indirect=True)
@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"n": 17}, "n", "beam_width_out_of_range"),
        ({"n": 16, "stop_token_ids": list(range(17))}, "n", "too_many_candidates"),
        ({"temperature": 0.5}, "temperature", "not_in_beam_search"),
        ({"top_k": 3}, "top_k", "not_in_beam_search"),
        ({"stop": "x"}, "stop", "not_in_beam_search"),
        ({"logprobs": 1}, "logprobs", "not_in_beam_search"),
        ({"presence_penalty": 1}, "presence_penalty", "not_in_beam_search"),
        ({"logit_bias": {"1": 1}}, "logit_bias", "not_in_beam_search"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs", "not_in_beam_search"),
        ({"length_penalty": 99}, "length_penalty", "length_penalty_out_of_range"),
        ({"use_beam_search": False, "length_penalty": 2}, "length_penalty", "no_beam_search"),
        ({"use_beam_search": None, "early_stopping": True}, "early_stopping", "no_beam_search"),
    ],
)
async def test_http_refuses_what_a_search_does_not_have(
    http: Http, change: dict[str, Any], param: str, code: str
) -> None:
    body = {"prompt": "The", "use_beam_search": True, "n": 2, **change}
    status, error = await http.error("/v1/completions", body)
    assert (status, error["param"].partition(".")[0], error["code"]) == (400, param, code)


@pytest.mark.parametrize("http_listen", ["127.0.0.1:0"], indirect=True)
async def test_http_advises_in_names_of_its_own(http: Http) -> None:
    body = {"messages": [{"role": "user", "content": "The"}], "use_beam_search": True,
            "max_completion_tokens": 9, "temperature": 0.5}  # fmt: skip
    status, error = await http.error("/v1/chat/completions", body)
    assert (status, error["param"]) == (400, "temperature")
    assert "use_beam_search" in error["message"]
    assert "max_tokens" not in error["message"]


@pytest.mark.parametrize("http_listen", ["127.0.0.1:0"], indirect=True)
async def test_http_accepts_neutral_values_of_sampling(stack: Stack, http: Http) -> None:
    body = {"prompt": "The", "use_beam_search": True, "n": 2, "max_tokens": 9, "temperature": 0,
            "top_p": 1, "repetition_penalty": 1, "min_tokens": 0, "logprobs_mode": "raw",
            "logit_bias": {}, "stop": [], "bad_words": []}  # fmt: skip
    started = http.start("/v1/completions", body)
    submission = await stack.scheduler.submissions.get()
    stack.scheduler.accept(submission)
    serve(stack.scheduler, submission, steps_of(two_texts(stack)))
    assert (await started).status_code == 200


@pytest.mark.parametrize("http_listen", ["127.0.0.1:0"], indirect=True)
@pytest.mark.parametrize("value", ["sometimes", 1, 0.5])
async def test_http_names_the_field_early_stopping(http: Http, value: object) -> None:
    body = {"prompt": "The", "use_beam_search": True, "n": 2, "early_stopping": value}
    status, error = await http.error("/v1/completions", body)
    assert (status, error["param"], error["code"]) == (400, "early_stopping", "invalid_field")


@pytest.mark.parametrize("http_listen", ["127.0.0.1:0"], indirect=True)
@pytest.mark.parametrize(
    ("change", "param"), [({}, "logprobs"), ({"top_logprobs": 2}, "top_logprobs")]
)
async def test_http_chat_names_the_field_of_log_probabilities_that_was_sent(
    http: Http, change: dict[str, Any], param: str
) -> None:
    messages = [{"role": "user", "content": "The"}]
    body = {"messages": messages, "use_beam_search": True, "logprobs": True, **change}
    status, error = await http.error("/v1/chat/completions", body)
    assert (status, error["param"], error["code"]) == (400, param, "not_in_beam_search")
