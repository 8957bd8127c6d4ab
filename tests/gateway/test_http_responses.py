"""`/v1/responses` over HTTP."""

import asyncio
import json
from typing import Any

import grpc
import openai
import pytest
import tools_model
from gateway_fake_scheduler import Delta, Entry, deltas
from google.protobuf import any_pb2
from google.rpc import error_details_pb2
from http_client import Event, Http
from openai.types.responses import Response

from gateway_svc.http.bodies.response import ResponseRequest
from gateway_svc.scheduler.shards import Shards
from quire.internal.v1 import scheduler_pb2
from quire.service.errors import RequestError


async def test_a_response(http: Http) -> None:
    body = {
        "model": "tiny",
        "instructions": "A",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "B"}]},
            {
                "type": "message",
                "id": "msg_1",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "C", "annotations": []}],
            },
            {"role": "user", "content": "D"},
        ],
        "max_output_tokens": 3,
        "metadata": {"a": "b"},
    }
    sending = http.start("/v1/responses", body, x_request_id="r")
    sent = await http.submission()
    assert sent.params.max_tokens == 3
    prompt = http.stack.gateway.served.get(None).vocabulary.decode(list(sent.prompt_token_ids))
    for part in ("<|system|>A", "<|user|>B", "<|assistant|>C", "<|user|>D"):
        assert part in prompt
    ids = http.stack.encode("fox")
    http.stack.scheduler.accept(sent)
    http.stack.scheduler.write(sent, 0, ids)
    stop = scheduler_pb2.END_REASON_STOP_TOKEN
    http.stack.scheduler.end(sent, len(ids), stop, stop_token_id=ids[-1])
    response = (await sending).json()
    assert (response["id"], response["object"], response["status"]) == (
        "resp_r",
        "response",
        "completed",
    )
    [item] = response["output"]
    assert item["content"][0]["text"] == "fox"
    assert response["metadata"] == {"a": "b"}
    assert response["usage"]["output_tokens"] == len(ids)
    # The client itself does not check that fields are there.
    Response.model_validate(response)


async def test_codex_labels_change_nothing(http: Http) -> None:
    labels = {"x-codex-installation-id": "a", "number": 1, "is_first": True, "parent": None}
    body = {"input": "x", "client_metadata": labels}
    response = await http.respond("/v1/responses", body, "fox")
    assert response["metadata"] == {}
    assert "client_metadata" not in response


async def test_adjacent_messages_of_the_input_are_joined(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Shards, "max_model_len", 150)
    items = [
        *({"role": "developer", "content": "B"}, {"role": "system", "content": "C"}),
        *({"role": "user", "content": "D"}, {"role": "user", "content": "E"}),
        *({"role": "assistant", "content": "F"}, {"role": "assistant", "content": "G"}),
        *({"role": "developer", "content": "H"}, {"role": "developer", "content": "I"}),
        {"role": "user", "content": "J"},
    ]
    sending = http.start("/v1/responses", {"instructions": "A", "input": items})
    sent = await http.stack.scheduler.serve_one(http.stack.encode("fox"))
    assert (await sending).status_code == 200
    prompt = http.stack.gateway.served.get(None).vocabulary.decode(list(sent.prompt_token_ids))
    assert [part.strip() for part in prompt.split("<|")[1:]] == [
        *("system|>A\nB\nC", "user|>D\nE", "assistant|>F", "assistant|>G"),
        *("system|>H", "system|>I", "user|>J", "assistant|>"),
    ]


def test_reasoning_belongs_to_no_later_item_than_the_next() -> None:
    items = [
        {"role": "user", "content": "a"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Why?"}]},
        {"type": "function_call_output", "call_id": "c", "output": "b"},
        {"role": "assistant", "content": "d"},
    ]
    body = ResponseRequest.model_validate({"input": items})
    messages = body.message("r").conversation.messages
    assert [message.role for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert not any(message.HasField("reasoning") for message in messages)


async def test_an_output_is_accepted_as_input(http: Http, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what OpenAI's clients add to it."""
    tools_model.use(http.stack, monkeypatch)
    asked = {"role": "user", "content": "x"}
    body = {
        "tools": [
            {"type": "function", **tools_model.FUNCTION},
            {"type": "function", "name": "now"},
        ],
        "include": ["message.output_text.logprobs"],
    }
    sending = http.start("/v1/responses", {**body, "input": [asked]})
    sent = await http.submission()
    ids = http.stack.encode(tools_model.OUTPUT)
    entries = [[Entry(id_, -0.5, 1)] for id_ in ids]
    http.stack.scheduler.accept(sent)
    http.stack.scheduler.send(deltas=deltas(Delta(sent, 0, ids, logprobs=entries)))
    http.stack.scheduler.end(sent, len(ids))
    output = (await sending).json()["output"]
    assert [item["type"] for item in output] == [
        *("reasoning", "message", "function_call", "function_call")
    ]
    [part] = output[1]["content"]
    assert part["logprobs"]
    part["parsed"] = {"a": [1]}
    output[2]["parsed_arguments"] = {"city": "Bern"}
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "ok"}
        for item in output[2:]
    ]
    sending = http.start("/v1/responses", {**body, "input": [asked, *output, *results]})
    again = await http.stack.scheduler.serve_one(http.stack.encode("fox"))
    assert (await sending).status_code == 200
    prompt = http.stack.gateway.served.get(None).vocabulary.decode(list(again.prompt_token_ids))
    assert prompt.count(tools_model.ARGUMENTS) == 1


async def test_the_first_exchanges_of_too_long_an_input_are_left_out(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = 150
    monkeypatch.setattr(Shards, "max_model_len", context)
    exchanges = [
        [
            {"role": "user", "content": f"Q{number}"},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"role": "assistant", "content": f"A{number}"},
        ]
        for number in range(9)
    ]
    developer = {"role": "developer", "content": "D"}
    items = [developer, *(item for exchange in exchanges for item in exchange)]
    shared = {"instructions": "S", "input": items, "truncation": "auto"}

    async def prompt(**change: object) -> str:
        sending = http.start("/v1/responses", {**shared, **change})
        sent = await http.stack.scheduler.serve_one(http.stack.encode("fox"))
        assert (await sending).json()["truncation"] == "auto"
        assert len(sent.prompt_token_ids) < context
        return http.stack.gateway.served.get(None).vocabulary.decode(list(sent.prompt_token_ids))

    lengths = []
    # The room for an output takes half of the context at most.
    for max_output_tokens in (None, 16, context // 2, 2**20):
        found = await prompt(max_output_tokens=max_output_tokens)
        kept = [number for number in range(9) if f"Q{number}" in found]
        assert kept == list(range(9 - len(kept), 9))
        assert [number for number in range(9) if f"A{number}" in found] == kept
        assert "<|system|>S\nD" in found
        lengths.append(len(kept))
    assert lengths == sorted(lengths, reverse=True)
    assert 9 > lengths[0] > lengths[2] == lengths[3] >= 1
    assert "Q0" in await prompt(input=exchanges[0])
    # The last exchange is not cut.
    long = [*exchanges[0], {"role": "user", "content": "x " * context}]
    for change in ({"truncation": "disabled"}, {"input": long}):
        status, error = await http.error("/v1/responses", {**shared, **change})
        assert (status, error["param"], error["code"]) == (400, "input", "context_length_exceeded")


async def _finish(http: Http, attachment: scheduler_pb2.Attachment, opaque: bytes) -> None:
    ids = http.stack.encode("a fox")
    http.stack.scheduler.accept(attachment, opaque)
    http.stack.scheduler.write(attachment, 0, ids)
    http.stack.scheduler.end(attachment, len(ids))


def _text(events: list[Event]) -> str:
    return "".join(
        event.json()["delta"] for event in events if event.name == "response.output_text.delta"
    )


async def test_the_events_of_a_response_are_streamed_again_after_each(http: Http) -> None:
    ids = http.stack.encode("a fox")
    async with http.stream(
        "/v1/responses", {"input": "x", "stream": True}, x_request_id="r"
    ) as events:
        sent = await http.submission()
        http.stack.scheduler.accept(sent)
        for at, id_ in enumerate(ids):
            http.stack.scheduler.write(sent, at, [id_])
        http.stack.scheduler.end(sent, len(ids))
        *whole, done = await events.rest()
    assert done.data == "[DONE]"
    names = [event.name for event in whole]
    assert names[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert names[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    numbers = [event.json()["sequence_number"] for event in whole]
    assert numbers == sorted(set(numbers))
    assert _text(whole) == "a fox"
    for at, number in enumerate(numbers):
        url = f"/v1/responses/resp_r?stream=true&starting_after={number}"
        async with http.stream(url) as events:
            received = asyncio.create_task(events.rest())
            # An index past the end is found when the choice ends; the events are read again then.
            while not received.done():
                getting = asyncio.create_task(http.stack.scheduler.attachments.get())
                await asyncio.wait({getting, received}, return_when=asyncio.FIRST_COMPLETED)
                if getting.done():
                    await _finish(http, getting.result(), sent.opaque)
                getting.cancel()
            *rest, _ = received.result()
        assert _text(whole[: at + 1]) + _text(rest) == "a fox"
        assert [event.name for event in rest][-4:] == names[max(at + 1, len(names) - 4) :]
        if rest:
            assert rest[-1].json()["response"]["output"] == (whole[-1].json()["response"]["output"])


async def test_a_response_in_the_background_is_retrieved_and_cancelled(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway_svc.http.routes.response._READ_S", 0.1)
    scheduler = http.stack.scheduler
    sending = http.start("/v1/responses", {"input": "x", "background": True}, x_request_id="r")
    sent = await http.submission()
    assert sent.resume_window_s == 3600
    scheduler.accept(sent)
    assert (await sending).json()["status"] == "queued"
    # It does not count as one whose client has disconnected, of which few run on.
    assert not (await scheduler.detachments.get()).client_gone

    getting = asyncio.create_task(http.client.get("/v1/responses/resp_r"))
    attachment = await scheduler.attachments.get()
    ids = http.stack.encode("a fox")
    scheduler.accept(attachment, sent.opaque)
    scheduler.write(attachment, 0, ids)
    response = (await getting).json()
    assert response["status"] == "in_progress"
    assert response["output"][0]["content"][0]["text"] == "a fox"
    assert not (await scheduler.detachments.get()).client_gone

    cancelling = asyncio.create_task(http.client.post("/v1/responses/resp_r/cancel"))
    attachment = await scheduler.attachments.get()
    scheduler.accept(attachment, sent.opaque)
    cancellation = await scheduler.cancellations.get()
    assert cancellation.request.request_id == "r"
    result = scheduler_pb2.CancellationResult(tag=cancellation.tag, found=True)
    scheduler.send(cancellation_results=[result])
    assert (await cancelling).json()["status"] == "cancelled"


async def test_a_cancelled_response_whose_stream_fails_at_once_is_an_object(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream has failed when it is closed, because the cancellation was answered."""
    scheduler = http.stack.scheduler
    sending = http.start("/v1/responses", {"input": "x", "background": True}, x_request_id="r")
    sent = await http.submission()
    scheduler.accept(sent)
    await sending
    generations = http.stack.gateway.generations
    requests, cancel = generations.scheduler.requests, generations.cancel

    async def cancel_and_fail(*args: Any) -> None:
        await cancel(*args)
        for stream in requests.streams:
            stream.fail(RequestError(grpc.StatusCode.CANCELLED, "cancelled"))

    monkeypatch.setattr(generations, "cancel", cancel_and_fail)
    cancelling = asyncio.create_task(http.client.post("/v1/responses/resp_r/cancel"))
    scheduler.accept(await scheduler.attachments.get(), sent.opaque)
    scheduler.found(await scheduler.cancellations.get(), found=True)
    async with asyncio.timeout(5):
        assert (await cancelling).json()["status"] == "cancelled"


def _take_over(http: Http, attachment: scheduler_pb2.Attachment | scheduler_pb2.Submission) -> None:
    """Fail an attachment as the scheduler does when another one takes the request."""
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason="TAKEN_OVER", domain="quire"))
    http.stack.scheduler.fail(attachment, grpc.StatusCode.ABORTED, details=[detail])


@pytest.mark.parametrize("background", [True, False])
async def test_a_response_that_another_reader_takes_over_is_returned_as_far_as_it_was_read(
    http: Http, background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway_svc.http.routes.response._READ_S", 60)
    scheduler = http.stack.scheduler
    body = {"input": "x", "background": background}
    creating = http.start("/v1/responses", body, x_request_id="r")
    sent = await http.submission()
    scheduler.accept(sent)
    getting = asyncio.create_task(http.client.get("/v1/responses/resp_r"))
    attachment = await scheduler.attachments.get()
    scheduler.accept(attachment, sent.opaque)
    scheduler.write(attachment, 0, http.stack.encode("a fox"))
    _take_over(http, attachment)
    response = await getting
    assert response.status_code == 200
    assert response.json()["status"] == "in_progress"
    assert response.json()["output"][0]["content"][0]["text"] == "a fox"
    scheduler.end(sent, 0)
    await creating


@pytest.mark.parametrize("action", ["retrieve", "cancel"])
async def test_a_response_that_is_taken_over_before_it_is_read_is_attached_again(
    http: Http, action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway_svc.http.routes.response._MAX_ATTACHMENTS", 2)
    scheduler = http.stack.scheduler
    creating = http.start("/v1/responses", {"input": "x", "background": True}, x_request_id="r")
    sent = await http.submission()
    scheduler.accept(sent)
    await creating
    path = "/v1/responses/resp_r"

    def start() -> asyncio.Task[Any]:
        is_read = action == "retrieve"
        sending = http.client.get(path) if is_read else http.client.post(f"{path}/cancel")
        return asyncio.create_task(sending)

    sending = start()
    _take_over(http, await scheduler.attachments.get())
    attachment = await scheduler.attachments.get()
    if action == "retrieve":
        await _finish(http, attachment, sent.opaque)
    else:
        scheduler.accept(attachment, sent.opaque)
        scheduler.found(await scheduler.cancellations.get(), found=True)
    expected = "incomplete" if action == "retrieve" else "cancelled"
    assert (await sending).json()["status"] == expected

    sending = start()
    for _ in range(2):
        _take_over(http, await scheduler.attachments.get())
    response = await sending
    assert (response.status_code, response.json()["error"]["code"]) == (409, "taken_over")


@pytest.mark.parametrize("action", ["retrieve", "cancel"])
@pytest.mark.parametrize("status", ["cancelled", "failed"])
@pytest.mark.parametrize("is_live", [True, False], ids=["live", "ended"])
async def test_a_response_that_ended_with_an_error_is_an_object(
    http: Http, action: str, status: str, is_live: bool
) -> None:
    scheduler = http.stack.scheduler
    sending = http.start("/v1/responses", {"input": "x", "background": True}, x_request_id="r")
    sent = await http.submission()
    scheduler.accept(sent)
    await sending
    path = "/v1/responses/resp_r"
    sending = asyncio.create_task(
        http.client.get(path) if action == "retrieve" else http.client.post(f"{path}/cancel")
    )
    code = grpc.StatusCode.CANCELLED if status == "cancelled" else grpc.StatusCode.INTERNAL
    attachment = await scheduler.attachments.get()
    if is_live:
        scheduler.accept(attachment, sent.opaque)
    if is_live and action == "cancel":
        # It ends before the cancellation arrives.
        cancellation = await scheduler.cancellations.get()
        result = scheduler_pb2.CancellationResult(tag=cancellation.tag, found=False)
        scheduler.send(cancellation_results=[result])
        attachment = await scheduler.attachments.get()
    scheduler.fail(attachment, code, opaque=sent.opaque)
    response = await sending
    assert response.status_code == 200
    body = response.json()
    assert (body["id"], body["status"], body["background"]) == ("resp_r", status, True)
    failure = {"code": "server_error", "message": "no"}
    assert body["error"] == (None if status == "cancelled" else failure)


@pytest.mark.parametrize("status", ["cancelled", "failed"])
async def test_the_stream_of_a_response_that_ended_with_an_error_has_its_end(
    http: Http, status: str
) -> None:
    scheduler = http.stack.scheduler
    sending = http.start("/v1/responses", {"input": "x", "background": True}, x_request_id="r")
    sent = await http.submission()
    scheduler.accept(sent)
    await sending
    code = grpc.StatusCode.CANCELLED if status == "cancelled" else grpc.StatusCode.INTERNAL
    for after, names in ((-1, ["created", "in_progress", status]), (9, [status])):
        getting = asyncio.create_task(
            http.client.get(f"/v1/responses/resp_r?stream=true&starting_after={after}")
        )
        scheduler.fail(await scheduler.attachments.get(), code, opaque=sent.opaque)
        lines = (await getting).text.splitlines()
        expected = [f"event: response.{name}" for name in names]
        assert [line for line in lines if line.startswith("event: ")] == expected
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert data[-1] == "[DONE]"
        last = json.loads(data[-2])
        assert last["sequence_number"] > after
        assert (last["response"]["id"], last["response"]["status"]) == ("resp_r", status)


@pytest.mark.parametrize(
    ("code", "status"),
    [(grpc.StatusCode.INTERNAL, "failed"), (grpc.StatusCode.CANCELLED, "cancelled")],
)
async def test_an_error_within_a_stream_ends_the_response(
    http: Http, code: grpc.StatusCode, status: str
) -> None:
    scheduler = http.stack.scheduler
    body = {"input": "x", "stream": True, "metadata": {"a": "b"}}
    async with http.stream("/v1/responses", body, x_request_id="r") as events:
        sent = await http.submission()
        scheduler.accept(sent)
        scheduler.write(sent, 0, http.stack.encode("fox"))
        scheduler.fail(sent, code, opaque=sent.opaque)
        *others, ended, error = await events.rest()
    assert (ended.name, error.name) == (f"response.{status}", "error")
    response = ended.json()["response"]
    assert (response["id"], response["status"]) == ("resp_r", status)
    assert response["metadata"] == {"a": "b"}
    Response.model_validate(response)
    numbers = [event.json()["sequence_number"] for event in (*others, ended, error)]
    assert numbers == sorted(set(numbers))
    # Top-level fields are those of OpenAI's API, `error` is what its clients raise.
    data = error.json()
    assert (data["type"], data["message"], data["error"]["message"]) == ("error", "no", "no")


async def test_a_stream_that_is_taken_over_does_not_end_its_response(http: Http) -> None:
    scheduler = http.stack.scheduler
    async with http.stream("/v1/responses", {"input": "x", "stream": True}) as events:
        sent = await http.submission()
        scheduler.accept(sent)
        tokens = http.stack.encode("a fox jumps")
        scheduler.write(sent, 0, tokens[:1])
        _take_over(http, sent)
        first, *_, delta, error = await events.rest()
    assert (delta.json()["delta"], error.name) == ("a", "error")
    # It continues behind the error's number, too.
    after = error.json()["sequence_number"]
    response_id = first.json()["response"]["id"]
    url = f"/v1/responses/{response_id}?stream=true&starting_after={after}"
    async with http.stream(url) as events:
        attachment = await scheduler.attachments.get()
        scheduler.accept(attachment, sent.opaque)
        scheduler.write(attachment, 0, tokens)
        scheduler.end(attachment, len(tokens))
        continued = [event for event in await events.rest() if event.name == delta.name]
    assert "".join(event.json()["delta"] for event in continued) == " fox jumps"


async def test_the_error_within_a_continued_stream_has_a_later_number(http: Http) -> None:
    scheduler = http.stack.scheduler
    sending = http.start("/v1/responses", {"input": "x", "background": True}, x_request_id="r")
    sent = await http.submission()
    scheduler.accept(sent)
    await sending
    async with http.stream("/v1/responses/resp_r?stream=true&starting_after=900") as events:
        attachment = await scheduler.attachments.get()
        scheduler.accept(attachment, sent.opaque)
        scheduler.fail(attachment, grpc.StatusCode.INTERNAL, opaque=sent.opaque)
        received = await events.rest()
    assert [(event.name, event.json()["sequence_number"]) for event in received] == [
        *(("response.failed", 901), ("error", 902))
    ]


@pytest.mark.parametrize("is_helper", [False, True])
async def test_openais_client_raises_the_error_of_a_stream(http: Http, is_helper: bool) -> None:
    scheduler = http.stack.scheduler
    names = set()

    async def read(client: openai.AsyncOpenAI) -> None:
        if is_helper:
            async with client.responses.stream(model="tiny", input="x") as stream:
                async for event in stream:
                    names.add(event.type)
            return
        async for one in await client.responses.create(model="tiny", input="x", stream=True):
            names.add(one.type)

    url = f"{http.client.base_url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        reading = asyncio.create_task(read(client))
        sent = await http.submission()
        scheduler.accept(sent)
        scheduler.write(sent, 0, http.stack.encode("fox"))
        scheduler.fail(sent, grpc.StatusCode.INTERNAL, opaque=sent.opaque)
        with pytest.raises(openai.APIError, match="no") as raised:
            await reading
    assert "response.failed" in names
    error: Any = raised.value.body
    assert error["type"] == "server_error"


async def test_a_failed_request_of_another_kind_is_no_response(http: Http) -> None:
    sending = http.start("/v1/completions", {"prompt": "x"})
    sent = await http.submission()
    sending.cancel()
    getting = asyncio.create_task(http.client.get("/v1/responses/resp_r"))
    attachment = await http.stack.scheduler.attachments.get()
    http.stack.scheduler.fail(attachment, grpc.StatusCode.CANCELLED, opaque=sent.opaque)
    assert (await getting).status_code == 404


async def test_what_is_no_response_is_not_found(http: Http) -> None:
    response = await http.client.get("/v1/responses/other")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "unknown_response")
    getting = asyncio.create_task(http.client.get("/v1/responses/resp_r"))
    attachment = await http.stack.scheduler.attachments.get()
    # A completion's.
    sending = http.start("/v1/completions", {"prompt": "x"})
    sent = await http.submission()
    sending.cancel()
    http.stack.scheduler.accept(attachment, sent.opaque)
    assert (await getting).status_code == 404


async def test_a_sequence_number_beyond_any_response_is_refused(http: Http) -> None:
    for number in (2**31, 10**23, -2):
        url = f"/v1/responses/resp_x?stream=true&starting_after={number}"
        response = await http.client.get(url)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "starting_after"


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"input": []}, "input", "invalid_field"),
        ({"input": [{"role": "user", "content": None}]}, "input[0].content", "invalid_field"),
        ({"input": "x " * 300}, "input", "context_length_exceeded"),
        ({"previous_response_id": "resp_x"}, "previous_response_id", "unsupported_field"),
        ({"conversation": "conv_x"}, "conversation", "unsupported_field"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "invalid_field"),
        ({"max_output_tokens": 0}, "max_output_tokens", "invalid_field"),
        ({"top_logprobs": 21}, "top_logprobs", "logprobs_out_of_range"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else str(value),
)
async def test_an_invalid_field_of_a_response_is_named(
    http: Http, change: dict[str, object], param: str, code: str
) -> None:
    status, error = await http.error("/v1/responses", {"input": "x", **change})
    assert (status, error["param"], error["code"]) == (400, param, code)


async def test_a_reference_to_an_earlier_response_is_refused_with_what_to_send(http: Http) -> None:
    asked = {"role": "user", "content": "x"}
    reference = {"type": "item_reference", "id": "msg_x"}
    for change, message in [
        (
            {"previous_response_id": "resp_x"},
            "previous_response_id: is not supported; use input with the earlier items",
        ),
        (
            {"input": [asked, reference]},
            "input[1]: is an item_reference, which is not supported; send the item itself",
        ),
    ]:
        status, error = await http.error("/v1/responses", {"input": [asked], **change})
        assert (status, error["code"], error["message"]) == (400, "unsupported_field", message)
