"""`/v1/completions` over HTTP."""

import asyncio
import json
from typing import Any

import gateway_tokenizers
import pytest
from gateway_fake_scheduler import Delta, Entry, choice_end, deltas
from http_client import Http

from gateway_svc.generation import submission as preparation
from quire.internal.v1 import scheduler_pb2


async def test_a_completion(http: Http) -> None:
    body = {"model": "tiny", "prompt": "The", "max_tokens": 4}
    completion = await http.respond("/v1/completions", body, " quick fox", x_request_id="r1")
    tokens = http.stack.encode(" quick fox")
    assert completion["id"] == "cmpl-r1"
    assert completion["object"] == "text_completion"
    assert completion["model"] == "tiny"
    assert completion["choices"] == [
        {
            "index": 0,
            "text": " quick fox",
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    num_prompt_tokens = len(http.stack.encode("The"))
    assert completion["usage"] == {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": len(tokens),
        "total_tokens": num_prompt_tokens + len(tokens),
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


async def test_every_parameter_reaches_the_scheduler(http: Http) -> None:
    body = {
        "prompt": [5, 6, 7],
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 3,
        "min_p": 0.125,
        "seed": -2,
        "max_tokens": 9,
        "n": 2,
        "stop": ["a", "b"],
        "stop_token_ids": [8],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "logprobs": 4,
        "priority": -3,
        "cache_salt": "salt",
        "resume_window_s": 30,
        "user": "u",
        # Values that change nothing.
        "best_of": 1,
        "suffix": None,
        "frequency_penalty": 0.0,
        "presence_penalty": 0,
        "logit_bias": {},
    }
    sending = http.start("/v1/completions", body)
    sent = await http.submission()
    assert list(sent.prompt_token_ids) == [5, 6, 7]
    params = sent.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.25, 3, 0.125)
    assert (params.seed, params.max_tokens, params.num_logprobs) == (2**64 - 2, 9, 5)
    assert list(params.stop_token_ids) == [8]
    assert (sent.n, sent.priority, sent.cache_salt) == (2, -3, b"salt")
    assert sent.resume_window_s == 30
    sending.cancel()


async def test_top_k_of_minus_one_considers_all_and_max_tokens_has_openai_s_default(
    http: Http,
) -> None:
    sending = http.start("/v1/completions", {"prompt": "The", "top_k": -1})
    sent = await http.submission()
    assert (sent.params.top_k, sent.params.max_tokens) == (0, 16)
    sending.cancel()


async def test_a_seed_of_minus_one_is_none(http: Http) -> None:
    async def seed_of(request_id: str, **change: int) -> int:
        sending = http.start("/v1/completions", {"prompt": "x", **change}, x_request_id=request_id)
        sent = await http.submission()
        sending.cancel()
        return sent.params.seed

    seeds = [await seed_of(request_id, seed=-1) for request_id in ("a", "b")]
    assert seeds == [await seed_of(request_id) for request_id in ("a", "b")]
    assert seeds[0] != seeds[1]


async def test_several_prompts_are_one_response(http: Http) -> None:
    """In the order of the prompts, with the choices of each."""
    body = {"prompt": ["The", [5, 6]], "n": 2, "echo": True}
    sending = http.start("/v1/completions", body, x_request_id="r")
    sent = [await http.submission(), await http.submission()]
    assert [one.request_id for one in sent] == ["r", "r-1"]
    for number, one in enumerate(reversed(sent)):
        http.stack.scheduler.accept(one)
        for choice in (1, 0):
            ids = http.stack.encode(f" {number}{choice}")
            http.stack.scheduler.write(one, 0, ids, choice)
            http.stack.scheduler.end(one, len(ids), choice=choice)
    completion = (await sending).json()
    echo = http.stack.gateway.served.get(None).vocabulary.decode([5, 6])
    assert [choice["text"] for choice in completion["choices"]] == [
        "The 10",
        "The 11",
        f"{echo} 00",
        f"{echo} 01",
    ]
    assert [choice["index"] for choice in completion["choices"]] == [0, 1, 2, 3]


async def test_the_id_of_several_prompts_is_that_of_the_request(http: Http) -> None:
    """Also if another prompt than the first one is accepted first."""
    sending = http.start("/v1/completions", {"prompt": ["a", "b"]}, x_request_id="r-1")
    scheduler = http.stack.scheduler
    first, second = [await http.submission() for _ in range(2)]
    for submission in sorted((first, second), key=lambda one: one.request_id, reverse=True):
        scheduler.accept(submission)
        scheduler.write(submission, 0, http.stack.encode("x"))
        scheduler.end(submission, 1)
    assert (await sending).json()["id"] == "cmpl-r-1"


async def test_a_client_that_asks_for_no_event_stream_gets_data_alone(http: Http) -> None:
    """vLLM's benchmark takes all of an event after `data: ` for JSON."""
    sending = http.start("/v1/completions", {"prompt": "The", "stream": True})
    await http.stack.scheduler.serve_one(http.stack.encode(" fox"))
    *chunks, done, rest = (await sending).text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    texts = [json.loads(c.removeprefix("data: "))["choices"][0]["text"] for c in chunks]
    assert "".join(texts) == " fox"


async def test_a_stream_has_usage_if_wanted_and_ends_with_done(http: Http) -> None:
    body = {
        "prompt": "The",
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    ids = http.stack.encode(" fox")
    async with http.stream("/v1/completions", body, x_request_id="s1") as events:
        sent = await http.submission()
        http.stack.scheduler.accept(sent)
        http.stack.scheduler.write(sent, 0, ids[:1])
        first = await events.next()
        assert first.id == "1"
        assert first.json()["usage"]["completion_tokens"] == 1
        http.stack.scheduler.write(sent, 1, ids[1:])
        http.stack.scheduler.end(sent, len(ids))
        rest = await events.rest()
    assert rest[-1].data == "[DONE]"
    assert {event.id for event in rest[-2:]} == {"done"}
    *chunks, last = [event.json() for event in rest[:-1]]
    texts = [chunk["choices"][0]["text"] for chunk in [first.json(), *chunks]]
    assert "".join(texts) == " fox"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len(ids)


async def test_logprobs_have_the_offset_of_each_token(http: Http) -> None:
    """Also of tokens that are parts of characters."""
    text = "a日 fox"
    ids = http.stack.encode(text)
    sending = http.start("/v1/completions", {"prompt": "The", "logprobs": 2})
    sent = await http.submission()
    http.stack.scheduler.accept(sent)
    part = http.stack.encode("語")[0]
    entries = [
        [Entry(id_, -1.0 - at, 2), Entry(7, -0.5, 1), Entry(part, -9.0, 3)]
        for at, id_ in enumerate(ids)
    ]
    http.stack.scheduler.send(
        deltas=deltas(Delta(sent, 0, ids, 0, entries)), choice_ends=[choice_end(sent, len(ids))]
    )
    logprobs = (await sending).json()["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-1.0 - at for at in range(len(ids))]
    offsets = logprobs["text_offset"]
    assert offsets[0] == 0
    assert offsets == sorted(offsets)
    assert text[offsets[-1] :] == logprobs["tokens"][-1]
    assert all(-0.5 in top.values() for top in logprobs["top_logprobs"])
    # Of tokens with the same text the most likely one, as lm-eval compares them.
    tops = zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True)
    assert [top[token] for token, top in tops] == logprobs["token_logprobs"]


def first_delta(
    sent: scheduler_pb2.Submission,
    token_ids: list[int],
    choice: int = 0,
    to: scheduler_pb2.Attachment | None = None,
) -> Delta:
    """The first tokens of a choice; with choice 0 the log-probabilities of the prompt."""
    prompt = list(sent.prompt_token_ids)
    of_prompt = [[Entry(id_, -float(at), 2), Entry(7, -0.5, 1)] for at, id_ in enumerate(prompt)]
    own = [[Entry(id_, -10.0 - at, 2), Entry(7, -0.5, 1)] for at, id_ in enumerate(token_ids)]
    return Delta(to or sent, 0, token_ids, choice, own, [] if choice else of_prompt[1:])


async def test_the_echo_has_logprobs_if_wanted(http: Http) -> None:
    """As lm-eval reads them."""
    prompts = ["a日 fox", http.stack.encode(" jumps over")]
    sending = http.start(
        "/v1/completions", {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": 1}
    )
    for _ in prompts:
        sent = await http.submission()
        assert (sent.params.num_logprobs, sent.params.num_prompt_logprobs) == (2, 2)
        http.stack.scheduler.accept(sent)
        ids = http.stack.encode(" x")[:1]
        http.stack.scheduler.send(
            deltas=deltas(first_delta(sent, ids)), choice_ends=[choice_end(sent, 1)]
        )
    texts = ["a日 fox", " jumps over"]
    choices = (await sending).json()["choices"]
    for text, choice in zip(texts, choices, strict=True):
        assert choice["text"].startswith(text)
        num_prompt_tokens = len(http.stack.encode(text))
        logprobs = choice["logprobs"]
        expected = [None, *(-float(at) for at in range(1, num_prompt_tokens)), -10.0]
        assert logprobs["token_logprobs"] == expected
        assert logprobs["top_logprobs"][0] is None
        assert all(-0.5 in top.values() for top in logprobs["top_logprobs"][1:])
        assert len(logprobs["tokens"]) == num_prompt_tokens + 1
        offsets = logprobs["text_offset"]
        assert offsets[0] == 0
        assert offsets == sorted(offsets)
        assert offsets[-1] == len(text)
        assert text[offsets[-2] :] == logprobs["tokens"][-2]


async def test_max_tokens_of_zero_returns_the_echo_alone(http: Http) -> None:
    body = {"prompt": "The fox", "echo": True, "logprobs": 0, "max_tokens": 0}
    sending = http.start("/v1/completions", body)
    sent = await http.submission()
    assert sent.params.max_tokens == 1
    http.stack.scheduler.accept(sent)
    delta = first_delta(sent, [3])._replace(
        logprobs=[[Entry(3, -1.0, 1)]],
        prompt_logprobs=[[Entry(id_, -1.0, 1)] for id_ in sent.prompt_token_ids[1:]],
    )
    end = choice_end(sent, 1, scheduler_pb2.END_REASON_STOP_TOKEN, stop_token_id=3)
    http.stack.scheduler.send(deltas=deltas(delta), choice_ends=[end])
    completion = (await sending).json()
    [choice] = completion["choices"]
    num_prompt_tokens = len(sent.prompt_token_ids)
    assert (choice["text"], choice["finish_reason"]) == ("The fox", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, *[-1.0] * (num_prompt_tokens - 1)]
    assert completion["usage"]["completion_tokens"] == 0


async def test_a_stream_s_echo_with_logprobs_comes_with_the_first_token(http: Http) -> None:
    """Once per choice, however often the client resumes."""
    body = {"prompt": "The fox", "echo": True, "logprobs": 1, "n": 2, "stream": True}
    body["resume_window_s"] = 30
    async with http.stream("/v1/completions", body, x_request_id="e1") as events:
        sent = await http.submission()
        http.stack.scheduler.accept(sent)
        # The second choice is faster, and waits for the log-probabilities.
        http.stack.scheduler.send(deltas=deltas(first_delta(sent, [3], 1)))
        http.stack.scheduler.send(deltas=deltas(first_delta(sent, [4])))
        found = [await events.next(), await events.next()]
        choices = {
            event.json()["choices"][0]["index"]: event.json()["choices"][0] for event in found
        }
        for index in (0, 1):
            assert choices[index]["text"].startswith("The fox")
            logprobs = choices[index]["logprobs"]["token_logprobs"]
            assert logprobs == [None, *(-float(at) for at in range(1, len(logprobs) - 1)), -10.0]
    async with http.stream("/v1/requests/e1/events", last_event_id="1.0") as events:
        again = await http.stack.scheduler.attachments.get()
        both = (first_delta(sent, [4], to=again), first_delta(sent, [3], 1, to=again))
        http.stack.scheduler.accept(again, sent.opaque, deltas=deltas(*both))
        event = await events.next()
        choice = event.json()["choices"][0]
        assert choice["index"] == 1
        assert choice["text"].startswith("The fox")


async def test_prompt_logprobs_have_vllm_s_shape(http: Http) -> None:
    sending = http.start("/v1/completions", {"prompt": [5, 6], "prompt_logprobs": 1})
    sent = await http.submission()
    http.stack.scheduler.accept(sent)
    delta = first_delta(sent, [3])._replace(logprobs=[])
    http.stack.scheduler.send(deltas=deltas(delta), choice_ends=[choice_end(sent, 1)])
    [choice] = (await sending).json()["choices"]
    decode = http.stack.gateway.served.get(None).vocabulary.decode
    assert choice["prompt_logprobs"] == [
        None,
        {
            "6": {"logprob": -1.0, "rank": 2, "decoded_token": decode([6])},
            "7": {"logprob": -0.5, "rank": 1, "decoded_token": decode([7])},
        },
    ]
    assert choice["logprobs"] is None


async def test_a_stop_string_is_kept_if_wanted(http: Http) -> None:
    for keeps, text in ((True, "a fox"), (False, "a ")):
        sending = http.start(
            "/v1/completions",
            {"prompt": "The", "stop": "fox", "include_stop_str_in_output": keeps},
        )
        sent = await http.submission()
        ids = http.stack.encode("a fox jumps")
        http.stack.scheduler.accept(sent)
        http.stack.scheduler.write(sent, 0, ids)
        finish = await http.stack.scheduler.finishes.get()
        reason = scheduler_pb2.END_REASON_STOP_STRING
        http.stack.scheduler.end(sent, finish.num_tokens, reason)
        choice = (await sending).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (
            text,
            "stop",
            "fox",
        )


async def test_token_ids_are_those_of_prompt_and_output(http: Http) -> None:
    """As in vLLM: of each choice's prompt, and of a chat's at top level; in the first event of a
    stream."""
    prompts, output = [[5, 6], [7]], http.stack.encode("fox")
    shared = {"return_token_ids": True}
    sending = http.start("/v1/completions", {"prompt": prompts, **shared})
    for _ in prompts:
        await http.stack.scheduler.serve_one(output)
    choices = (await sending).json()["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == prompts
    assert [choice["token_ids"] for choice in choices] == [output, output]
    body = {"prompt": [5, 6], "stream": True, **shared}
    async with http.stream("/v1/completions", body) as events:
        await http.stack.scheduler.serve_one(output)
        first, *others = [e.json()["choices"][0] for e in await events.rest() if e.data[0] == "{"]
    assert (first["prompt_token_ids"], first["token_ids"], first["text"]) == ([5, 6], [], "")
    assert [id_ for choice in others for id_ in choice["token_ids"]] == output
    assert not any("prompt_token_ids" in choice for choice in others)
    body = {"messages": [{"role": "user", "content": "a"}], **shared}
    sending = http.start("/v1/chat/completions", body)
    submission = await http.stack.scheduler.serve_one(output)
    response = (await sending).json()
    assert response["prompt_token_ids"] == list(submission.prompt_token_ids)
    async with http.stream("/v1/chat/completions", {**body, "n": 2, "stream": True}) as events:
        submission = await http.submission()
        http.stack.scheduler.accept(submission)
        for _ in range(2):
            chunk = (await events.next()).json()
            assert chunk["prompt_token_ids"] == list(submission.prompt_token_ids)
        for choice in range(2):
            http.stack.scheduler.end(submission, 0, choice=choice)
        last = [event.json() for event in await events.rest() if event.data[0] == "{"]
    assert not any("prompt_token_ids" in chunk for chunk in last)


async def test_the_reason_of_a_stop_is_no_end_of_sequence_token(http: Http) -> None:
    """As in vLLM."""
    [eos] = http.stack.gateway.served.get(None).files.eos_token_ids
    for path, prompt in (
        ("/v1/completions", {"prompt": "The"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        for params, token_id, expected in (
            ({}, eos, None),
            ({"stop_token_ids": [eos]}, eos, None),
            ({"stop_token_ids": [5]}, 5, 5),
            ({"stop_token_ids": [eos], "ignore_eos": True}, eos, eos),
        ):
            for stream in (False, True):
                sending = http.start(path, {**prompt, **params, "stream": stream})
                sent = await http.submission()
                http.stack.scheduler.accept(sent)
                http.stack.scheduler.write(sent, 0, [token_id])
                reason = scheduler_pb2.END_REASON_STOP_TOKEN
                http.stack.scheduler.end(sent, 1, reason, stop_token_id=token_id)
                text = (await sending).text
                # The last event before [DONE].
                found = json.loads(text.split("data: ")[-2] if stream else text)["choices"][0]
                assert (found["finish_reason"], found["stop_reason"]) == ("stop", expected)


@pytest.mark.parametrize("prompt", ["x " * 100_000, "x " * 300, [1] * 300], ids=lambda _: "")
async def test_too_long_a_prompt_is_refused_in_words_that_clients_recognise(
    http: Http, prompt: object
) -> None:
    max_model_len = http.stack.gateway.generations.scheduler.max_model_len
    status, error = await http.error("/v1/completions", {"prompt": prompt})
    assert (status, error["param"], error["code"]) == (400, "prompt", "context_length_exceeded")
    assert f"This model's maximum context length is {max_model_len} tokens" in error["message"]


INVALID_FIELDS: list[tuple[dict[str, object], str, str]] = [
    ({"prompt": None}, "prompt", "invalid_field"),
    ({"prompt": []}, "prompt", "invalid_field"),
    ({"prompt": ""}, "prompt", "empty_prompt"),
    ({"prompt": ["x"] * 1025}, "prompt", "invalid_field"),
    ({"prompt": "x " * 300}, "prompt", "context_length_exceeded"),
    ({"prompt": [10**9]}, "prompt[0]", "token_id_outside_vocabulary"),
    ({"prompt": [[1], "x", [-1]]}, "prompt[2][0]", "invalid_field"),
    ({"model": "other"}, "model", "model_not_found"),
    ({"temperature": -1}, "temperature", "temperature_out_of_range"),
    ({"temperature": "1"}, "temperature", "invalid_field"),
    ({"n": 0}, "n", "invalid_field"),
    ({"n": 17}, "n", "n_out_of_range"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens_out_of_range"),
    ({"logprobs": 21}, "logprobs", "logprobs_out_of_range"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "invalid_field"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "prompt_logprobs_out_of_range"),
    ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs", "unsupported_field"),
    ({"stop": ["a"] * 17}, "stop", "too_many_stop"),
    ({"suffix": "x"}, "suffix", "unsupported_field"),
    ({"best_of": 2}, "best_of", "unsupported_field"),
    ({"echo": True, "logprobs": 21}, "logprobs", "logprobs_out_of_range"),
    ({"frequency_penalty": 2.5}, "frequency_penalty", "frequency_penalty_out_of_range"),
    ({"logit_bias": {"5": -101}}, "logit_bias[5]", "logit_bias_out_of_range"),
    ({"allowed_token_ids": [9**9]}, "allowed_token_ids[0]", "token_id_outside_vocabulary"),
    ({"min_tokens": 17}, "min_tokens", "min_tokens_out_of_range"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_field"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "no_stream"),
    ({"frequency": 1}, "frequency", "unknown_field"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown_field"),
]


async def test_an_invalid_field_is_named(http: Http) -> None:
    for change, param, code in INVALID_FIELDS:
        status, error = await http.error("/v1/completions", {"prompt": "x", **change})
        assert status == (404 if code == "model_not_found" else 400)
        assert (error["param"], error["code"]) == (param, code)
        assert error["message"].startswith(f"{param}: ")
        assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_stop_token_is_text_if_stops_are_included(http: Http, is_stream: bool) -> None:
    """As in vLLM; special tokens stay hidden unless `skip_special_tokens` is false."""
    *before, last = http.stack.encode("The fox")
    model = http.stack.gateway.served.get(None)
    [eos], begin = model.files.eos_token_ids, model.vocabulary.decode(before)
    kept = {"include_stop_str_in_output": True}
    for stop_id, change, text in (
        (last, {}, begin),
        (last, kept, "The fox"),
        (eos, kept, begin),
        (eos, {**kept, "skip_special_tokens": False}, begin + gateway_tokenizers.EOS),
    ):
        body = {
            "prompt": "x",
            "stop_token_ids": [last],
            "stream": is_stream,
            "logprobs": 0,
            **change,
        }
        sending = http.start("/v1/completions", body)
        sent = await http.submission()
        ids = [*before, stop_id]
        http.stack.scheduler.accept(sent)
        http.stack.scheduler.write(sent, 0, ids)
        stop = scheduler_pb2.END_REASON_STOP_TOKEN
        http.stack.scheduler.end(sent, len(ids), stop, stop_token_id=stop_id)
        response = await sending
        if is_stream:
            lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
            choices = [one for line in lines for one in json.loads(line)["choices"]]
            assert "".join(choice["text"] for choice in choices) == text
        else:
            assert response.json()["choices"][0]["text"] == text


async def test_a_body_that_is_no_object_is_refused(http: Http) -> None:
    response = await http.client.post("/v1/completions", content=b'{"prompt": ')
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "malformed_json"
    status, _ = await http.error("/v1/completions", [1])
    assert status == 400
    large = b'"' + b"x" * 2**21 + b'"'
    response = await http.client.post("/v1/completions", content=large)
    assert response.json()["error"]["code"] == "request_too_large"


async def test_others_proceed_between_the_prompts_of_a_batch(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token ids are prepared without waiting for a thread."""
    order: list[str] = []
    prepare = preparation.prepare

    async def recorded(*arguments: Any) -> preparation.PreparedRequest:
        order.append("prompt")
        asyncio.get_running_loop().call_soon(order.append, "other")
        return await prepare(*arguments)

    monkeypatch.setattr(preparation, "prepare", recorded)
    status, error = await http.error("/v1/completions", {"prompt": [[5], [6], [2**31]]})
    assert (status, error["code"]) == (400, "token_id_outside_vocabulary")
    assert order == ["prompt", "other", "prompt", "other", "prompt", "other"]
