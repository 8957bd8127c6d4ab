"""The official client of OpenAI's API against real processes that serve the demo model."""

import asyncio
import itertools
import json
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from typer.testing import CliRunner

from quire.cli import app
from quire.client.client import Client
from quire.client.sampling_params import SamplingParams
from quire.launcher.stack import LocalStack

MODEL = str(Path(__file__).resolve().parents[2] / "demo" / "model")
PROMPT = "Return the number of"
GREEDY = {"model": "demo", "temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    """Two gateways, so that a request can be resumed at the other one."""
    with LocalStack(
        MODEL,
        served_model_name="demo",
        num_gateways=2,
        http_listen="127.0.0.1:0",
        settings={"QUIRE_WORKER_DTYPE": "float32"},
    ) as stack:
        yield stack


@pytest.fixture
def client(stack: LocalStack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"http://{stack.http_addresses[0]}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


@pytest.fixture(scope="module")
def expected(stack: LocalStack) -> str:
    """The text over gRPC."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with Client(stack.address) as client:
        return client.generate(PROMPT, params).outputs[0].text


def test_a_completion_is_that_of_grpc(client: openai.OpenAI, expected: str) -> None:
    completion = client.completions.create(prompt=PROMPT, **GREEDY)
    assert completion.choices[0].text == expected
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 12
    with client.completions.create(
        prompt=PROMPT, stream=True, stream_options={"include_usage": True}, **GREEDY
    ) as stream:
        chunks = list(stream)
    assert "".join(c.text for chunk in chunks for c in chunk.choices) == expected
    assert chunks[-1].usage == completion.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}  # type: ignore[union-attr]
    )


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Bern", "Rome"]},
                "days": {"type": "integer", "minimum": 0, "maximum": 9},
            },
            "required": ["city", "days"],
        },
    },
}


def test_forced_calls_follow_their_schemas(client: openai.OpenAI) -> None:
    """At temperature 1, in a loop of calls and results."""
    forced: Any = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    messages: list[Any] = [{"role": "user", "content": "Is it warm?"}]
    for seed in range(2):
        shared = {"model": "demo", "messages": messages, "seed": seed, "max_tokens": 150, **forced}
        [choice] = client.chat.completions.create(**shared).choices
        assert choice.finish_reason == "tool_calls"
        [call] = choice.message.tool_calls or ()
        with client.chat.completions.stream(**shared) as stream:
            [streamed] = stream.get_final_completion().choices
        assert streamed.message.tool_calls is not None
        function = streamed.message.tool_calls[0].function
        assert (function.name, function.arguments) == (
            call.function.name,  # type: ignore[union-attr]
            call.function.arguments,  # type: ignore[union-attr]
        )
        arguments = json.loads(function.arguments)
        assert set(arguments) == {"city", "days"}
        assert arguments["city"] in ("Bern", "Rome")
        assert arguments["days"] in range(10)
        result = {"role": "tool", "tool_call_id": call.id, "content": "warm"}
        messages += [choice.message, result]


def test_several_prompts_and_choices(client: openai.OpenAI, expected: str) -> None:
    completion = client.completions.create(
        prompt=[PROMPT, "Raise"], n=2, logprobs=2, seed=3, **GREEDY
    )
    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
    assert completion.choices[0].text == completion.choices[1].text == expected
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.text_offset is not None
    assert logprobs.tokens is not None
    # Special tokens have an entry, but no text.
    joined = "".join(logprobs.tokens).replace("<|endoftext|>", "")
    assert joined == expected
    assert [joined[at:] for at in logprobs.text_offset][-1] == logprobs.tokens[-1]


def test_the_echo_has_the_log_probabilities_of_the_prompt(
    stack: LocalStack, client: openai.OpenAI
) -> None:
    """Those of the output are the same when it is a prompt."""
    url = f"http://{stack.http_addresses[0]}/tokenize"
    ids = httpx2.post(url, json={"prompt": PROMPT}).json()["tokens"]
    shared = {"model": "demo", "temperature": 0, "logprobs": 1}
    extra = {"ignore_eos": True, "return_token_ids": True}
    [made] = client.completions.create(prompt=ids, max_tokens=8, extra_body=extra, **shared).choices
    made_ids: list[int] = made.token_ids  # type: ignore[attr-defined]
    prompt = [*ids, *made_ids]
    whole = client.completions.create(prompt=prompt, max_tokens=0, echo=True, **shared)
    [choice] = whole.choices
    assert choice.text.startswith(PROMPT + made.text)
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None
    assert made.logprobs is not None
    assert choice.logprobs.tokens[-8:] == made.logprobs.tokens
    first, *rest = choice.logprobs.token_logprobs
    assert first is None
    assert rest[-8:] == pytest.approx(made.logprobs.token_logprobs, abs=1e-3)
    assert choice.logprobs.text_offset[len(ids)] == len(PROMPT)
    assert whole.usage.completion_tokens == 0
    with client.completions.create(
        prompt=prompt, max_tokens=1, echo=True, stream=True, **shared
    ) as stream:
        chunks = [c for chunk in stream for c in chunk.choices]
    assert chunks[0].logprobs.token_logprobs[1 : len(prompt)] == pytest.approx(rest, abs=1e-3)


def test_a_chat_with_log_probabilities(client: openai.OpenAI) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}]
    shared = {**GREEDY, "messages": messages, "logprobs": True, "top_logprobs": 3}
    completion = client.chat.completions.create(**shared)  # type: ignore[call-overload]
    [choice] = completion.choices
    content = choice.logprobs.content
    assert len(content) == 12
    assert all(len(entry.top_logprobs) == 3 for entry in content)
    with client.chat.completions.create(stream=True, **shared) as stream:  # type: ignore[call-overload]
        deltas = [c for chunk in stream for c in chunk.choices]
    assert "".join(c.delta.content or "" for c in deltas) == choice.message.content
    assert sum(len(c.logprobs.content) for c in deltas if c.logprobs) == 12


def test_a_response_is_streamed_retrieved_and_cancelled(client: openai.OpenAI) -> None:
    shared = {"model": "demo", "input": PROMPT, "temperature": 0, "max_output_tokens": 12}
    response = client.responses.create(**shared)
    assert response.output_text
    with client.responses.create(stream=True, **shared) as stream:
        events = list(stream)
    last = events[-1].response
    assert last.output_text == response.output_text
    assert client.responses.retrieve(last.id).output_text == response.output_text
    background = client.responses.create(
        **{**shared, "max_output_tokens": 900},
        background=True,
        # Otherwise it would end within milliseconds.
        extra_body={"min_tokens": 900},
    )
    assert background.status == "queued"
    assert client.responses.cancel(background.id).status == "cancelled"
    for again in (client.responses.retrieve, client.responses.cancel):
        ended = again(background.id)
        assert (ended.status, ended.background) == ("cancelled", True)
    assert client.responses.cancel(response.id).output_text == response.output_text


def test_errors_are_the_client_s_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no model 'nope'"):
        client.completions.create(model="nope", prompt="x")
    with pytest.raises(openai.BadRequestError, match="temperature") as raised:
        client.completions.create(model="demo", prompt="x", temperature=-1)
    assert raised.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match=r"context_length_exceeded|tokens"):
        client.completions.create(model="demo", prompt="word " * 3000)
    assert client.models.list().data[0].id == "demo"


async def test_streams_of_many_clients_at_once(stack: LocalStack, expected: str) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"http://{stack.http_addresses[1]}/v1", api_key="none", max_retries=0
    ) as client:

        async def text() -> str:
            stream = await client.completions.create(prompt=PROMPT, stream=True, **GREEDY)
            return "".join([c.text async for chunk in stream for c in chunk.choices])

        assert set(await asyncio.gather(*(text() for _ in range(24)))) == {expected}


def test_a_request_continues_at_another_gateway(stack: LocalStack) -> None:
    """With the id of the last event that was received."""
    first, second = (f"http://{address}" for address in stack.http_addresses)
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 300, "ignore_eos": True}
    response = httpx2.post(f"{first}/v1/completions", json=body, timeout=60)
    whole = response.json()["choices"][0]["text"]
    streamed = {**body, "stream": True, "resume_window_s": 30}
    headers = {"x-request-id": "continued", "accept": "text/event-stream"}
    events = _events(httpx2.stream, "POST", f"{first}/v1/completions", streamed, headers)
    received = list(itertools.islice(events, 20))
    events.close()
    headers = {"last-event-id": received[-1][0]}
    url = f"{second}/v1/requests/continued/events"
    received += _events(httpx2.stream, "GET", url, None, headers)
    assert received[-1] == ("done", "[DONE]")
    texts = [json.loads(data)["choices"][0]["text"] for _, data in received[:-1]]
    assert "".join(texts) == whole


def _events(
    stream: Any, method: str, url: str, body: dict[str, Any] | None, headers: dict[str, str]
) -> Generator[tuple[str, str], None, None]:
    """The id and the data of each event."""
    last_id = ""
    with stream(method, url, json=body, headers=headers, timeout=30) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            name, _, value = line.partition(": ")
            if name == "id":
                last_id = value
            elif name == "data":
                yield last_id, value


def test_a_batch_file_has_the_texts_of_grpc(
    stack: LocalStack, expected: str, tmp_path: Path
) -> None:
    greedy = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "prompt": PROMPT}
    bodies = [greedy, {**greedy, "top_p": 2}, greedy]
    source = tmp_path / "in.jsonl"
    source.write_text(
        "\n".join(
            json.dumps({"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": b})
            for i, b in enumerate(bodies)
        )
    )
    url = f"http://{stack.http_addresses[0]}/v1"
    result = CliRunner().invoke(app, ["run-batch", "-i", str(source), "-o", "-", "--base-url", url])
    assert (result.exit_code, result.stderr) == (1, "3 requests, 1 failed\n")
    outputs = {o["custom_id"]: o["response"] for o in map(json.loads, result.stdout.splitlines())}
    assert [outputs[i]["status_code"] for i in "012"] == [200, 400, 200]
    assert outputs["1"]["body"]["error"]["param"] == "top_p"
    assert {outputs[i]["body"]["choices"][0]["text"] for i in "02"} == {expected}
