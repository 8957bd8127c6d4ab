import asyncio
import copy
import pickle

import grpc
import pytest
from scripted_server import MAX_CALLS
from waiting import until

from quire import (
    AsyncClient,
    CancelledError,
    Client,
    CompletionOutput,
    Logprob,
    QuireError,
    SamplingParams,
    Usage,
)


def test_generate_returns_the_whole_output(client, server):
    output = client.generate(
        "hello",
        SamplingParams(seed=4),
        request_id="mine",
        model="m",
        cache_salt="s",
        priority=-5,
    )
    assert output.request_id == "mine"
    assert output.model == "scripted"
    assert output.prompt == "hello"
    assert output.prompt_token_ids == [7, 8, 9]
    assert output.outputs == [CompletionOutput(0, "HELLO", [1, 2], "stop", 2)]
    assert output.usage == Usage(3, 1, 2)
    [request] = server.inference.requests
    assert (request.model, request.cache_salt, request.priority) == ("m", "s", -5)
    assert request.sampling_params.seed == 4


def test_absent_options_are_not_sent(client, server):
    client.generate("hello", model=None, priority=None)
    [request] = server.inference.requests
    assert [field.name for field, _ in request.ListFields()] == ["request_id", "text"]


def test_token_ids_and_conversations_are_prompts(client, server):
    assert client.generate([5, 6]).prompt_token_ids == [5, 6]
    output = client.generate([{"role": "user", "content": "Hi"}])
    assert output.prompt is None
    tokens, conversation = server.inference.requests
    assert list(tokens.token_ids.ids) == [5, 6]
    assert conversation.conversation.messages[0].content == "Hi"


@pytest.mark.parametrize("prompt", [[4, 5, 6, 7, 8, 9], "seven eight nine"])
def test_the_prompts_token_ids_are_those_that_truncation_kept(client, prompt):
    """The scripted usage has three tokens."""
    params = SamplingParams(truncate_prompt_tokens=-1)
    assert client.generate(prompt, params).prompt_token_ids == [7, 8, 9]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([1, -2], r"prompt\[1\]: must not be negative \(got -2\)"),
        ([1, "a"], r"prompt\[1\]: must be an integer \(got 'a'\)"),
        ([1, 2.5], r"prompt\[1\]: must be an integer \(got 2\.5\)"),
        ([True], r"prompt\[0\]: must be an integer \(got True\)"),
        (7, r"prompt: must be a text, token ids or a conversation \(got 7\)"),
        (None, r"prompt: must be a text, .* \(got None\)"),
        (b"hello", r"prompt: must be a text, .* \(got b'hello'\)"),
        ({"text": "hello"}, r"prompt: must be a text, .* \(got \{'text': 'hello'\}\)"),
        ("a\udcff", "prompt: no valid UTF-8 at character 1"),
    ],
)
def test_an_invalid_prompt_is_refused_before_it_is_sent(client, server, prompt, message):
    with pytest.raises((TypeError, ValueError), match=message):
        client.generate(prompt)
    # Also before the first message is requested.
    with pytest.raises((TypeError, ValueError), match=message):
        client.stream_generate(prompt)
    assert server.inference.requests == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"request_id": 5}, r"request_id: must be a text \(got 5\)"),
        ({"model": ["m"]}, r"model: must be a text \(got \['m'\]\)"),
        ({"cache_salt": b"s"}, r"cache_salt: must be a text \(got b's'\)"),
        ({"priority": "high"}, r"priority: must be an integer \(got 'high'\)"),
        ({"priority": [0, 1]}, r"priority: must be an integer \(got \[0, 1\]\)"),
        ({"max_tokens": 3}, r"max_tokens: no such option of a request \(got 3\)"),
        ({"text": "other"}, "text: no such option"),
        ({"sampling_params": {"seed": 3}}, r"sampling_params: must be SamplingParams \(got \{"),
        ({"timeout_s": "5"}, r"timeout_s: must be a number \(got '5'\)"),
    ],
)
def test_an_invalid_option_is_refused_before_it_is_sent(client, server, options, message):
    with pytest.raises(TypeError, match=message):
        client.generate("hello", **options)
    assert server.inference.requests == []


@pytest.mark.parametrize(
    ("priority", "message"),
    [
        (-(2**31) - 1, r"priority: must be at least -2147483648 \(got -2147483649\)"),
        (2**31, r"priority: must be at most 2147483647 \(got 2147483648\)"),
    ],
)
def test_a_priority_is_a_number_of_32_bits(client, server, priority, message):
    with pytest.raises(ValueError, match=message):
        client.generate("hello", priority=priority)
    assert server.inference.requests == []


def test_zero_is_a_priority(client, server):
    list(client.stream_generate("hello", priority=0))
    [request] = server.inference.requests
    assert request.HasField("priority")


def test_n_completions_are_in_the_order_of_their_indices(client):
    output = client.generate("a b", SamplingParams(n=3))
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert [completion.text for completion in output.outputs] == ["A B", "AA BB", "AAA BBB"]


def expected_logprobs(k, *token_ids):
    """The scripted log-probabilities of these tokens."""
    if k is None:
        return []
    return [
        {id_: Logprob(-id_ / 2, id_ + 1, f"t{id_}") for id_ in (own, *range(k))}
        for own in token_ids
    ]


@pytest.mark.parametrize("k", [None, 0, 1, 2, 20])
def test_logprobs_are_in_the_message_of_their_tokens(client, k):
    params = SamplingParams(n=2, logprobs=k)
    for completion in client.generate("a b", params).outputs:
        assert completion.logprobs == expected_logprobs(k, 1, 2)
    outputs = [o for d in client.stream_generate("a b", params) for o in d.outputs if o.index]
    assert [delta.logprobs for delta in outputs] == [
        expected_logprobs(k, 0),
        expected_logprobs(k, 1),
        [],
    ]


def test_the_sampled_tokens_logprob_is_first(client):
    [completion] = client.generate("a", SamplingParams(logprobs=2)).outputs
    # The second token is beyond the most likely ones, the first is one of them.
    assert [list(one) for one in completion.logprobs] == [[1, 0], [2, 0, 1]]


def test_the_deltas_of_a_stream_have_their_completions_index(client):
    texts = ["", ""]
    ended = []
    for delta in client.stream_generate("a b", SamplingParams(n=2)):
        for output in delta.outputs:
            texts[output.index] += output.text
            if output.finish_reason:
                ended.append(output.index)
        assert delta.usage is None or len(ended) == 2
    assert (texts, ended) == (["AB", "AABB"], [1, 0])


def test_invalid_arguments_of_other_calls_are_named(client):
    with pytest.raises(TypeError, match=r"prompt: must be a text or a conversation \(got \[5\]\)"):
        client.tokenize([5])
    with pytest.raises(TypeError, match="add_special_tokens: must be True or False"):
        client.tokenize("a", add_special_tokens="no")
    with pytest.raises(ValueError, match=r"token_ids\[0\]: must not be negative \(got -1\)"):
        client.detokenize([-1])
    with pytest.raises(TypeError, match="token_ids: must be a list of token ids"):
        client.detokenize("abc")
    with pytest.raises(TypeError, match="request_id: must be a text"):
        client.cancel(None)
    with pytest.raises(TypeError, match="next_token_indices: must be a list of integers"):
        client.resume("r1", None)
    with pytest.raises(TypeError, match=r"tls: must be a quire.TLS \(got True\)"):
        Client("localhost:50051", tls=True)


@pytest.mark.parametrize("prompts", ["ab", b"ab", None, {"prompt": "ab"}])
def test_prompts_are_a_list_and_not_one_text(client, server, prompts):
    with pytest.raises(TypeError, match=r"prompts: must be a list of prompts \(got "):
        client.generate_all(prompts, [None, None])
    with pytest.raises(TypeError, match=r"prompts: must be a list of prompts \(got "):
        client.beam_search_all(prompts)
    assert server.inference.requests == []


def test_parameters_are_a_list_as_long_as_the_prompts(client, server):
    params = SamplingParams(seed=1)
    with pytest.raises(TypeError, match="sampling_params: must be a list of SamplingParams"):
        client.generate_all(["a", "b"], params)
    with pytest.raises(ValueError, match="1 sampling parameters for 2 prompts"):
        client.generate_all(["a", "b"], [params])
    for call in (
        client.beam_search_all,
        lambda each, **name: client.generate_all(each, each, **name),
    ):
        with pytest.raises(ValueError, match=r"request_id: is the id of one request \(got 2 pr"):
            call([None, None], request_id="r1")
    assert server.inference.requests == []
    outputs = client.generate_all((text for text in "ab"), (params for _ in range(2)))
    assert [output.text for output in outputs] == ["A", "B"]


@pytest.mark.parametrize("target", [None, 50051, "", "http://127.0.0.1:50051", "localhost"])
@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_an_invalid_address_is_refused(kind, target):
    with pytest.raises((TypeError, ValueError), match=r"target: .* host:port or unix:/path"):
        kind(target)


def test_an_ipv6_address_without_brackets_is_refused_with_an_example():
    for target in ("::1:50051", "fe80::1", "[::g]:1", "[10.0.0.1]:1"):
        with pytest.raises(ValueError, match=r"target: .* host:port or unix:/path") as refused:
            Client(target)
        assert ("as in [::1]:50051" in str(refused.value)) == target.startswith((":", "f"))


@pytest.mark.parametrize(
    "target", ["[::1]:50051", "[fe80::1%lo]:50051", "dns:///quire:50051", "unix:/run/quire.sock"]
)
def test_addresses(target):
    Client(target).close()


def test_a_closed_client_refuses_calls(server):
    client = Client(server.target)
    client.close()
    client.close()
    for call in (client.generate, client.tokenize, lambda text: next(client.stream_generate(text))):
        with pytest.raises(ValueError, match="the client is closed"):
            call("hello")


async def test_closing_a_client_ends_its_calls_with_an_error(server):
    """Also those that return failures."""
    client = Client(server.target)
    stream = client.stream_generate("hang")
    next(stream)
    calls = [
        asyncio.create_task(asyncio.to_thread(list, stream)),
        asyncio.create_task(asyncio.to_thread(client.generate, "hang")),
        asyncio.create_task(
            asyncio.to_thread(client.generate_all, ["hang"], [None], return_exceptions=True)
        ),
    ]
    await until(lambda: len(server.inference.requests) == 3, "the calls")
    client.close()
    streamed, whole, [returned] = await asyncio.gather(*calls, return_exceptions=True)
    for error in (streamed, whole, returned):
        assert isinstance(error, CancelledError)
        assert str(error) == "CANCELLED: the client is closed"


def test_a_message_has_a_role_and_a_content(client):
    with pytest.raises(ValueError, match="messages: expected"):
        client.generate([{"role": "user", "text": "Hi"}])


def test_outputs_are_in_the_order_of_the_prompts(client):
    prompts = [f"prompt {i}" for i in range(100)]
    outputs = client.generate_all(prompts, [None] * 100)
    assert [output.prompt for output in outputs] == prompts
    assert [output.outputs[0].text for output in outputs] == [p.upper() for p in prompts]


def test_the_number_of_calls_in_progress_is_bounded(client, server, monkeypatch):
    monkeypatch.setattr("quire.client.concurrent_calls.MAX_CALLS", 4)
    outputs = client.generate_all(["barrier 4"] * MAX_CALLS, [None] * MAX_CALLS)
    assert len(outputs) == MAX_CALLS
    assert server.inference.max_running == 4


def test_prompts_run_at_the_same_time(client):
    outputs = client.generate_all([f"barrier {MAX_CALLS}"] * MAX_CALLS, [None] * MAX_CALLS)
    assert len(outputs) == MAX_CALLS


def test_a_status_becomes_an_error_that_names_the_field(client):
    with pytest.raises(QuireError, match=r"INVALID_ARGUMENT: .*got -1\.0") as caught:
        client.generate("bad")
    error = caught.value
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert error.field == "sampling_params.temperature"
    assert error.reason == "NEGATIVE"
    assert error.retry_after_s is None


def test_an_error_is_the_same_when_it_is_pickled_or_copied(client):
    with pytest.raises(QuireError) as caught:
        client.generate("bad")
    error = caught.value
    # As a pool of processes returns it; by default it would take the pool with it.
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert (type(other), str(other), vars(other)) == (type(error), str(error), vars(error))


def test_an_error_has_the_time_to_retry(server):
    with Client(server.target, resume_timeout_s=0) as client, pytest.raises(QuireError) as caught:
        list(client.stream_generate("busy"))
    assert caught.value.retry_after_s == 2.5
    assert caught.value.reason == "NO_WORKER"
    assert caught.value.message == "no worker has joined"


@pytest.mark.parametrize("call", ["generate", "stream_generate"])
def test_a_full_queue_has_the_time_to_retry(client, call):
    with pytest.raises(QuireError, match="RESOURCE_EXHAUSTED: too many requests wait") as caught:
        list(getattr(client, call)("full"))
    assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (caught.value.reason, caught.value.retry_after_s) == ("QUEUE_FULL", 0.5)


def test_the_first_failure_raises_and_cancels_the_others(client, server):
    with pytest.raises(QuireError, match="INVALID_ARGUMENT"):
        client.generate_all(["hang", "bad later"], [None, None])
    assert server.inference.released.wait(10)


def test_an_absent_server_is_named():
    with (
        Client("127.0.0.1:1", resume_timeout_s=0) as client,
        pytest.raises(QuireError, match=r"no server responds at 127\.0\.0\.1:1"),
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
    # Without a deadline gRPC returns None or infinity.
    assert none is None or none > 1e6
    # gRPC rounds up what it sends.
    assert all(0 < seconds <= 62 for seconds in left)


@pytest.mark.parametrize("timeout_s", [float("inf"), 1e12])
def test_a_huge_timeout_is_no_timeout(client, server, timeout_s):
    client.generate("hello", timeout_s=timeout_s)
    [left] = server.inference.seconds_left
    assert left is None or left > 1e6


@pytest.mark.parametrize("timeout_s", [float("nan"), -1, -float("inf")])
def test_an_invalid_timeout_is_refused(client, server, timeout_s):
    with pytest.raises(ValueError, match="timeout_s: must be a number of seconds from 0"):
        client.generate("hello", timeout_s=timeout_s)
    assert server.inference.requests == []


def test_a_stream_has_acceptance_then_deltas_then_usage(client):
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
