import grpc
import pytest
from scripted_server import MAX_CALLS

from quire import Client, CompletionOutput, QuireError, SamplingParams, Usage


def test_generate_gives_the_whole_answer(client, server):
    output = client.generate(
        "hello", SamplingParams(seed=4), request_id="mine", model="m", cache_salt="s"
    )
    assert output.request_id == "mine"
    assert output.model == "scripted"
    assert output.prompt == "hello"
    assert output.prompt_token_ids is None
    assert output.outputs == [CompletionOutput(0, "HELLO", [1, 2], "stop", 2)]
    assert output.usage == Usage(3, 1, 2)
    [request] = server.inference.requests
    assert (request.model, request.cache_salt, request.sampling_params.seed) == ("m", "s", 4)


def test_what_is_not_said_is_not_sent(client, server):
    client.generate("hello", model=None)
    [request] = server.inference.requests
    assert [field.name for field, _ in request.ListFields()] == ["text"]


def test_token_ids_and_conversations_are_prompts(client, server):
    assert client.generate([5, 6]).prompt_token_ids == [5, 6]
    output = client.generate([{"role": "user", "content": "Hi"}])
    assert output.prompt is None
    tokens, conversation = server.inference.requests
    assert list(tokens.token_ids.ids) == [5, 6]
    assert conversation.conversation.messages[0].content == "Hi"


@pytest.mark.parametrize("prompt", [[1, -2], [1, "a"], 7, [1, 2.5]])
def test_what_is_no_prompt_is_refused_before_it_is_sent(client, server, prompt):
    with pytest.raises((TypeError, ValueError), match="prompt: expected"):
        client.generate(prompt)
    assert server.inference.requests == []


def test_a_message_has_a_role_and_a_content(client):
    with pytest.raises(ValueError, match="messages: expected"):
        client.generate([{"role": "user", "text": "Hi"}])


def test_outputs_come_in_the_order_of_the_prompts(client):
    prompts = [f"prompt {i}" for i in range(100)]
    outputs = client.generate_all(prompts, [None] * 100)
    assert [output.prompt for output in outputs] == prompts
    assert [output.outputs[0].text for output in outputs] == [p.upper() for p in prompts]


def test_prompts_run_at_the_same_time(client):
    outputs = client.generate_all([f"meet {MAX_CALLS}"] * MAX_CALLS, [None] * MAX_CALLS)
    assert len(outputs) == MAX_CALLS


def test_a_status_becomes_an_error_that_names_the_field(client):
    with pytest.raises(QuireError, match=r"INVALID_ARGUMENT: .*got -1\.0") as caught:
        client.generate("bad")
    error = caught.value
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert error.field == "sampling_params.temperature"
    assert error.reason == "NEGATIVE"
    assert error.retry_after_s is None


def test_an_error_says_when_to_come_again(client):
    with pytest.raises(QuireError) as caught:
        list(client.stream_generate("busy"))
    assert caught.value.retry_after_s == 2.5
    assert caught.value.reason == "NO_WORKER"
    assert caught.value.message == "no worker is attached"


def test_the_first_failure_raises_and_cancels_the_others(client, server):
    with pytest.raises(QuireError, match="INVALID_ARGUMENT"):
        client.generate_all(["hang", "bad later"], [None, None])
    assert server.inference.released.wait(10)


def test_an_absent_server_is_named():
    with (
        Client("127.0.0.1:1") as client,
        pytest.raises(QuireError, match=r"no server answers at 127\.0\.0\.1:1"),
    ):
        client.generate("hello")


def test_a_timeout_ends_the_call(client):
    with pytest.raises(QuireError) as caught:
        client.generate("hang", timeout_s=0.2)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


def test_a_timeout_is_a_deadline_for_the_server_too(client, server):
    client.generate("hello")
    client.generate("hello", timeout_s=60)
    list(client.stream_generate("hello", timeout_s=60))
    none, *left = server.inference.seconds_left
    # Without a deadline gRPC gives None, or time without end.
    assert none is None or none > 1e6
    # gRPC rounds up what it sends.
    assert all(0 < seconds <= 62 for seconds in left)


def test_a_stream_gives_acceptance_then_deltas_then_usage(client):
    accepted, *words, last = client.stream_generate("one two three")
    assert (accepted.request_id, accepted.text, accepted.outputs) == ("r1", "", [])
    assert [delta.text for delta in words] == ["ONE", "TWO", "THREE"]
    assert [delta.outputs[0].first_token_index for delta in words] == [0, 1, 2]
    assert all(delta.usage is None for delta in words)
    assert last.usage == Usage(3, 1, 2)
    assert (last.outputs[0].finish_reason, last.outputs[0].stop_reason) == ("stop", "END")


def test_closing_a_stream_cancels_the_call(client, server):
    stream = client.stream_generate("hang")
    next(stream)
    assert server.inference.hanging.wait(10)
    stream.close()
    assert server.inference.released.wait(10)


def test_cancel_tokenize_detokenize_and_models(client, server):
    client.cancel("r7")
    assert server.inference.cancelled_ids == ["r7"]
    assert client.tokenize("ab") == [0, 97, 98]
    assert client.tokenize("ab", add_special_tokens=False) == [97, 98]
    assert client.tokenize([{"role": "user", "content": "b"}]) == [0, 98]
    assert client.detokenize([97, 98]) == "ab"
    [model] = client.list_models()
    assert (model.name, model.max_model_len, model.eos_token_ids) == ("scripted", 64, [2])


async def test_works_where_an_event_loop_is_running(client):
    assert client.generate("hello").outputs[0].text == "HELLO"
    assert "".join(delta.text for delta in client.stream_generate("a b")) == "AB"
