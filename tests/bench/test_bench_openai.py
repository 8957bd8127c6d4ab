"""The OpenAI client of the load generator, against a scripted HTTP server."""

import pytest
from scripted_openai import WITHOUT_IDS, Handler

from quire.bench.load import run_load
from quire.bench.openai_server import OpenAIServer, message_of, served_model
from quire.bench.server import RequestFailed
from quire.bench.workload import BenchRequest


async def run_at(url: str, *prompts: list[int], ignore_eos: bool = True):
    server = OpenAIServer(url, "served", 0.5, ignore_eos, "secret")
    try:
        requests = [BenchRequest(prompt, 3) for prompt in prompts]
        return await run_load(server, requests, [0.0] * len(requests))
    finally:
        await server.close()


async def test_tokens_are_counted_by_their_ids(url):
    [timings] = await run_at(url, [9, 8])
    assert (timings.error, timings.counts, timings.token_ids) == (None, [1, 2], [5, 6, 7])
    assert timings.num_output_tokens == 3


async def test_without_ids_the_servers_count_is_used(url, monkeypatch):
    monkeypatch.setattr(Handler, "chunks", WITHOUT_IDS)
    [timings] = await run_at(url, [9, 8])
    assert (timings.counts, timings.token_ids, timings.num_output_tokens) == ([1, 1], [], 3)


async def test_a_request_has_token_ids_and_its_options(url):
    await run_at(url, [9, 8])
    await run_at(url, [9, 8], ignore_eos=False)
    extended, plain = Handler.bodies
    assert plain == {
        "model": "served",
        "prompt": [9, 8],
        "max_tokens": 3,
        "temperature": 0.5,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert extended == {**plain, "ignore_eos": True, "return_token_ids": True}
    assert Handler.authorizations == ["Bearer secret"] * 2


async def test_failures_are_recorded_and_other_requests_continue(url):
    refused, cut, broken, done = await run_at(url, [0], [1], [2], [9])
    assert refused.error == 'HTTP 400: {"error": "no such parameter"}'
    assert cut.error == "the stream ended without [DONE]"
    assert broken.error == "out of memory"
    assert done.error is None


async def test_an_absent_server_fails_each_request():
    [timings] = await run_at("http://127.0.0.1:1", [9])
    assert timings.error is not None
    assert timings.error.startswith("ConnectError")


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
def test_the_served_model_is_found_with_or_without_the_apis_path(url, path):
    assert served_model(f"{url}{path}", None) == "served"


def test_a_server_of_another_kind_is_named():
    with pytest.raises(ValueError, match=r"no OpenAI-compatible server at http://127.0.0.1:1"):
        served_model("http://127.0.0.1:1", None)


@pytest.mark.parametrize("error", ['{"message": "too long"}', '"too long"'])
def test_an_error_in_a_stream_fails_its_request(error):
    with pytest.raises(RequestFailed, match=r"^too long$"):
        message_of(f'{{"error": {error}}}')


@pytest.mark.parametrize(
    "chunk",
    [
        "[1]",
        "null",
        '"x"',
        "{",
        '{"choices": [3]}',
        '{"choices": {"a": 1}}',
        '{"choices": [{"text": "a", "token_ids": 5}]}',
        '{"choices": [], "usage": 5}',
        '{"choices": [], "usage": {"completion_tokens": "x"}}',
    ],
)
def test_an_invalid_chunk_fails_its_request(chunk):
    with pytest.raises(RequestFailed, match="invalid chunk of completions: "):
        message_of(chunk)


def test_fields_may_be_null_or_unknown():
    assert message_of('{"choices": null, "usage": null, "error": null}').count == 0
    assert message_of('{"choices": [{"text": "a", "token_ids": null, "more": 1}]}').count == 1
