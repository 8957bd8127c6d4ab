"""Requests over HTTP: their ids, events that are resumed, cancellation, disconnected clients."""

import asyncio
import json
import math
import socket
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import grpc
import openai
import pytest
from gateway_fake_scheduler import Delta, deltas
from google.protobuf import any_pb2
from google.rpc import error_details_pb2
from http_client import Http
from waiting import until

from gateway_svc.generation.choice import ChoiceEnd, ChoiceUpdate
from gateway_svc.generation.service import GenerationService
from gateway_svc.generation.submission import PreparedRequest
from gateway_svc.http.bodies.fields import GenerationMessage
from gateway_svc.http.event_id import EventId
from gateway_svc.http.merge import Merge
from gateway_svc.http.response_writer import ResponseWriter
from gateway_svc.http.server import HttpServer
from quire.client.async_client import AsyncClient
from quire.client.client import Client
from quire.client.errors import UnavailableError
from quire.internal.v1 import scheduler_pb2
from quire.service.errors import RequestError


async def test_a_stream_is_resumed_after_the_last_event(http: Http) -> None:
    """As a browser's EventSource does, from each event of each choice."""
    texts = ["a fox jumps", "the lazy dog"]
    ids = [http.stack.encode(text) for text in texts]
    body = {"prompt": "The", "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    scheduler = http.stack.scheduler
    async with http.stream("/v1/completions", body, x_request_id="r") as events:
        sent = await http.submission()
        scheduler.accept(sent)
        for at in range(max(map(len, ids))):
            parts = [Delta(sent, at, ids[i][at : at + 1], i) for i in (0, 1) if at < len(ids[i])]
            scheduler.send(deltas=deltas(*parts))
        for choice in (0, 1):
            scheduler.end(sent, len(ids[choice]), choice=choice)
        whole = await events.rest()
    for number, last in enumerate(whole[:-1]):
        assert last.id is not None
        if last.id == "done":
            continue
        async with http.stream("/v1/requests/r/events", last_event_id=last.id) as events:
            attachment = await scheduler.attachments.get()
            scheduler.accept(attachment, sent.opaque)
            scheduler.send(deltas=deltas(*(Delta(attachment, 0, ids[i], i) for i in (0, 1))))
            for choice in (0, 1):
                scheduler.end(attachment, len(ids[choice]), choice=choice)
            rest = await events.rest()
        for choice, text in enumerate(texts):
            assert _text(whole[: number + 1], choice) + _text(rest, choice) == text
            assert _ends(whole[: number + 1], choice) + _ends(rest, choice) == 1
        assert rest[-2].data == whole[-2].data
        assert rest[-1].data == "[DONE]"
    response = await http.client.get("/v1/requests/r/events", headers={"last-event-id": "done"})
    assert response.status_code == 204


@pytest.mark.parametrize(
    ("last_id", "reason"),
    [
        ("0", "is for 1 choices of prompt 0; the request has 2"),
        ("5", "is for 1 choices of prompt 0; the request has 2"),
        ("e", "is for 1 choices of prompt 0; the request has 2"),
        ("0*3", "has 3 entries; the request has 2 choices"),
        ("0,0", "is for 2 prompts; the request has 1"),
        ("0*2,0*2,0*2", "is for 3 prompts; the request has 1"),
        ("-x2", "is for 2 prompts; the request has 1"),
        ("3*2", "is 3; the choice has ended with 2 tokens"),
    ],
)
async def test_an_event_id_of_another_request_is_refused(
    http: Http, last_id: str, reason: str
) -> None:
    body = {"prompt": "The", "n": 2, "stream": True, "resume_window_s": 30}
    scheduler = http.stack.scheduler
    ids = http.stack.encode("a fox")
    async with http.stream("/v1/completions", body, x_request_id="r"):
        sent = await http.submission()
        scheduler.accept(sent)
        headers = {"last-event-id": last_id}
        events = asyncio.create_task(http.client.get("/v1/requests/r/events", headers=headers))
        attachment = await scheduler.attachments.get()
        scheduler.accept(attachment, sent.opaque)
        scheduler.send(deltas=deltas(*(Delta(attachment, 0, ids, at) for at in (0, 1))))
        for choice in (0, 1):
            scheduler.end(attachment, len(ids), choice=choice)
        response = await events
    if response.status_code == 200:
        # Known only at the end of the choice, when the stream has begun.
        error = json.loads(response.text.split("data: ")[-1].splitlines()[0])["error"]
    else:
        assert response.status_code == 400
        error = response.json()["error"]
    assert error["param"].startswith("Last-Event-ID")
    assert reason in error["message"]


def _text(events: list, choice: int) -> str:
    chunks = [c for event in events if event.data != "[DONE]" for c in event.json()["choices"]]
    return "".join(chunk["text"] for chunk in chunks if chunk["index"] == choice)


def _ends(events: list, choice: int) -> int:
    chunks = [c for event in events if event.data != "[DONE]" for c in event.json()["choices"]]
    return sum(1 for c in chunks if c["index"] == choice and c["finish_reason"] is not None)


async def test_a_request_of_several_prompts_is_resumed_as_one(http: Http) -> None:
    body = {"prompt": ["a", "b", "c"], "stream": True, "echo": True, "resume_window_s": 60}
    scheduler, ids = http.stack.scheduler, http.stack.encode(" fox")
    async with http.stream("/v1/completions", body, x_request_id="r"):
        sent = [await http.submission() for _ in range(3)]
    for _ in sent:
        await scheduler.detachments.get()
    async with http.stream("/v1/requests/r/events") as events:
        for number in range(3):
            attachment = await scheduler.attachments.get()
            own = next(one for one in sent if one.request_id == attachment.request_id)
            assert number or own.request_id == "r"
            scheduler.accept(attachment, own.opaque)
            scheduler.write(attachment, 0, ids)
            scheduler.end(attachment, len(ids))
        rest = await events.rest()
    assert [_text(rest, choice) for choice in range(3)] == ["a fox", "b fox", "c fox"]


async def test_the_prompts_of_a_resumed_request_have_times_of_their_own(http: Http) -> None:
    """Nothing came between the first tokens of two prompts."""
    body = {"prompt": ["a", "b"], "stream": True, "resume_window_s": 60}
    scheduler = http.stack.scheduler
    async with http.stream("/v1/completions", body, x_request_id="r"):
        sent = [await http.submission() for _ in range(2)]
        for one in sent:
            scheduler.accept(one)
        async with http.stream("/v1/requests/r/events") as events:
            for _ in sent:
                attachment = await scheduler.attachments.get()
                own = next(one for one in sent if one.request_id == attachment.request_id)
                scheduler.accept(attachment, own.opaque)
                scheduler.send(deltas=deltas(Delta(attachment, 0, http.stack.encode("a"))))
                await events.next()
            text = (await http.client.get("/metrics")).text
    count = 'quire:inter_token_latency_seconds_count{tenant_class="default"}'
    assert f"{count} 0.0" in text


async def test_a_client_that_disconnects_ends_its_request(http: Http) -> None:
    for body in ({"prompt": "The", "stream": True}, {"prompt": "The"}):
        sending = http.start("/v1/completions", body)
        sent = await http.submission()
        http.stack.scheduler.accept(sent)
        http.stack.scheduler.write(sent, 0, http.stack.encode("fox"))
        sending.cancel()
        cancellation = await http.stack.scheduler.cancellations.get()
        assert cancellation.attachment == sent.attachment


async def begin_reluctantly(
    http: Http, body: dict[str, Any]
) -> tuple[HttpServer, socket.socket, scheduler_pb2.Submission]:
    """A completion of a client that has sent its request and reads nothing."""
    server = http.stack.gateway.http
    assert server is not None
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    host, _, port = server.address.rpartition(":")
    client.connect((host, int(port)))
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    client.sendall(head.encode() + data)
    sent = await http.submission()
    http.stack.scheduler.accept(sent)
    # The system's buffer would hold megabytes of a response.
    [protocol] = server._server.server_state.connections
    connection = protocol.transport.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return server, client, sent


@pytest.mark.parametrize("prompts", ["The", ["The", "A"]], ids=["one prompt", "two prompts"])
async def test_a_client_that_does_not_read_loses_its_connection_and_resumes(
    http: Http, prompts: str | list[str]
) -> None:
    scheduler, body = http.stack.scheduler, {"prompt": prompts, "stream": True}
    server, client, sent = await begin_reluctantly(http, body)
    [x] = http.stack.encode("x")
    detached = asyncio.create_task(scheduler.detachments.get())
    at = 0
    while not detached.done():
        scheduler.write(sent, at, [x] * 1000)
        at += 1000
        await asyncio.sleep(0)
    detachment = await detached
    assert (detachment.attachment, detachment.client_gone) == (sent.attachment, False)
    await asyncio.wait_for(server.requests.wait_until_idle(), 5)
    client.close()


async def test_the_connection_of_a_client_that_takes_nothing_ends(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway_svc.admission.http_connection.TAKING_S", 0.1)
    body = {"prompt": "The", "stream": True}
    server, client, sent = await begin_reluctantly(http, body)
    [x], at = http.stack.encode("x"), 0
    connections = server._server.server_state.connections
    async with asyncio.timeout(30):
        while connections:
            http.stack.scheduler.write(sent, at, [x] * 1000)
            at += 1000
            await asyncio.sleep(0.01)
    await asyncio.wait_for(server.requests.wait_until_idle(), 5)
    client.close()


async def test_a_client_may_take_a_response_slowly(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than a client may take nothing."""
    monkeypatch.setattr("gateway_svc.admission.http_connection.TAKING_S", 1)
    body = bytes(2**20)
    monkeypatch.setattr("gateway_svc.http.response_writer.orjson.dumps", lambda _: body)
    _, client, sent = await begin_reluctantly(http, {"prompt": "The"})
    http.stack.scheduler.write(sent, 0, http.stack.encode("x"))
    http.stack.scheduler.end(sent, 1)
    client.setblocking(False)
    num_read, began_s = 0, time.monotonic()
    while num_read < len(body):
        data = await asyncio.get_running_loop().sock_recv(client, 2**20)
        assert data, f"the connection has ended after {num_read} bytes"
        num_read += len(data)
        await asyncio.sleep(0.01)
    assert time.monotonic() - began_s > 1
    client.close()


async def test_a_request_is_cancelled_by_its_id(http: Http) -> None:
    sending = asyncio.create_task(http.client.delete("/v1/requests/some"))
    cancellation = await http.stack.scheduler.cancellations.get()
    assert cancellation.request == scheduler_pb2.RequestKey(request_id="some")
    http.stack.scheduler.found(cancellation, False)
    await refuse_attachment(http)
    response = await sending
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "unknown_request"


async def refuse_attachment(http: Http) -> None:
    """The next attachment is to a request that the scheduler does not have."""
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason="UNKNOWN_REQUEST", domain="quire"))
    attachment = await http.stack.scheduler.attachments.get()
    http.stack.scheduler.fail(attachment, grpc.StatusCode.NOT_FOUND, details=[detail])


@pytest.mark.parametrize(
    ("live", "status"), [({0, 1, 2}, 204), ({2}, 204), ({0}, 204), (set(), 404)]
)
async def test_all_prompts_of_a_request_are_cancelled(
    http: Http, live: set[int], status: int
) -> None:
    """Those that are live, if any is. The first one, which has ended, has their number."""
    body = {"prompt": ["a", "b", "c"], "stream": True, "resume_window_s": 60}
    scheduler = http.stack.scheduler
    async with http.stream("/v1/completions", body, x_request_id="r"):
        sent = [await http.submission() for _ in range(3)]
    for _ in sent:
        await scheduler.detachments.get()
    sending = asyncio.create_task(http.client.delete("/v1/requests/r"))
    cancellation = await scheduler.cancellations.get()
    assert cancellation.request.request_id == "r"
    # An earlier attachment would take the stream of a live request over.
    assert scheduler.attachments.empty()
    scheduler.found(cancellation, 0 in live)
    attachment = await scheduler.attachments.get()
    [first] = [one for one in sent if one.request_id == attachment.request_id]
    if 0 in live:
        scheduler.fail(attachment, grpc.StatusCode.CANCELLED, opaque=first.opaque)
    else:
        ids = http.stack.encode("fox")
        scheduler.accept(attachment, first.opaque)
        scheduler.write(attachment, 0, ids)
        scheduler.end(attachment, len(ids))
    for _ in range(2):
        cancellation = await scheduler.cancellations.get()
        prompt = int(cancellation.request.request_id.removeprefix("r-"))
        scheduler.found(cancellation, prompt in live)
    assert (await sending).status_code == status


async def test_a_reader_of_several_prompts_sees_the_cancellation_by_its_id(http: Http) -> None:
    """The gateway of the reader attaches to none of them."""
    body = {"prompt": ["a", "b"], "stream": True, "resume_window_s": 60}
    scheduler = http.stack.scheduler
    async with http.stream("/v1/completions", body, x_request_id="r") as events:
        sent = {one.request_id: one for one in [await http.submission() for _ in range(2)]}
        for one in sent.values():
            scheduler.accept(one)
            scheduler.write(one, 0, http.stack.encode("fox"))
        await events.next()
        sending = asyncio.create_task(http.client.delete("/v1/requests/r"))
        for request_id in ("r", "r-1"):
            cancellation = await scheduler.cancellations.get()
            assert cancellation.request.request_id == request_id
            scheduler.found(cancellation, True)
            scheduler.fail(sent[request_id], grpc.StatusCode.CANCELLED)
        assert (await sending).status_code == 204
        *_, last = await events.rest()
    assert last.json()["error"]["message"] == "no"
    assert scheduler.attachments.empty()


async def test_a_request_is_cancelled_while_a_later_prompt_is_prepared(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = GenerationService.prepare
    is_preparing, may_prepare = asyncio.Event(), asyncio.Event()

    async def wait_and_prepare(
        service: GenerationService, message: GenerationMessage, *args: Any
    ) -> PreparedRequest:
        if message.request_id == "r-1":
            is_preparing.set()
            await may_prepare.wait()
        return await prepare(service, message, *args)

    monkeypatch.setattr(GenerationService, "prepare", wait_and_prepare)
    creating = http.start("/v1/completions", {"prompt": ["a", "b"]}, x_request_id="r")
    await is_preparing.wait()
    sending = asyncio.create_task(http.client.delete("/v1/requests/r"))
    http.stack.scheduler.found(await http.stack.scheduler.cancellations.get(), False)
    await refuse_attachment(http)
    assert (await sending).status_code == 204
    may_prepare.set()
    assert (await creating).json()["error"]["code"] == "cancelled"
    assert http.stack.scheduler.submissions.empty()


async def test_ids_with_slashes_are_in_paths(http: Http) -> None:
    """Ids of gRPC and of the headers may have them; clients encode them, or not."""
    scheduler = http.stack.scheduler
    deleting = asyncio.create_task(http.client.delete("/v1/requests/a%2Fb"))
    cancellation = await scheduler.cancellations.get()
    assert cancellation.request.request_id == "a/b"
    scheduler.found(cancellation, True)
    await refuse_attachment(http)
    assert (await deleting).status_code == 204
    for request in (
        http.client.get("/v1/requests/a/b/events"),
        http.client.get("/v1/responses/resp_a%2Fb"),
        http.client.post("/v1/responses/resp_a/b/cancel"),
    ):
        asking = asyncio.create_task(request)
        attachment = await scheduler.attachments.get()
        assert attachment.request_id == "a/b"
        scheduler.fail(attachment, grpc.StatusCode.NOT_FOUND)
        assert (await asking).status_code == 404
    # Neither is it taken for an id.
    response = await http.client.get("/v1/responses/resp_r/input_items")
    assert response.json()["error"]["message"].endswith("/input_items: Not Found")


async def test_an_error_after_the_start_is_an_event(http: Http) -> None:
    async with http.stream("/v1/completions", {"prompt": "The", "stream": True}) as events:
        sent = await http.submission()
        http.stack.scheduler.accept(sent)
        http.stack.scheduler.write(sent, 0, http.stack.encode("fox"))
        await events.next()
        http.stack.scheduler.fail(sent, grpc.StatusCode.RESOURCE_EXHAUSTED)
        *_, last = await events.rest()
    assert last.json()["error"]["type"] == "rate_limit_error"


async def test_comments_keep_an_idle_stream_alive(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[dict] = []

    async def send(message: dict) -> None:
        written.append(message)

    monkeypatch.setattr("gateway_svc.http.response_writer.KEEP_ALIVE_S", 0)
    writer = ResponseWriter(send, "r")
    await writer.keep_alive()
    assert written == []
    await writer.start()
    await writer.keep_alive()
    assert written[-1]["body"] == b": keep-alive\n\n"


async def test_unknown_paths_and_event_ids_are_refused(http: Http) -> None:
    response = await http.client.get("/v1/nothing")
    assert (response.status_code, response.json()["error"]["code"]) == (404, None)
    assert response.json()["error"]["message"] == "GET /v1/nothing: Not Found"
    response = await http.client.get("/v1/completions")
    assert response.status_code == 405
    for method, path, meant in (
        ("POST", "/chat/completions", "/v1/chat/completions"),
        ("POST", "/v1/v1/completions", "/v1/completions"),
        ("GET", "/models", "/v1/models"),
        ("GET", "/models/tiny", "/v1/models/tiny"),
        ("POST", "/v1/tokenize", "/tokenize"),
        ("POST", "/v1//chat/completions", "/v1/chat/completions"),
    ):
        response = await http.client.request(method, path)
        assert response.status_code == 404
        message = f"{method} {path}: Not Found; the path is {meant}: check the client's base URL"
        assert response.json()["error"]["message"] == message


async def test_a_slash_at_the_end_of_a_path_changes_nothing(http: Http) -> None:
    for path in ("/v1/models", "/v1/models/tiny", "/health"):
        response = await http.client.get(f"{path}/")
        assert (response.status_code, response.json()) == (
            200,
            (await http.client.get(path)).json(),
        )
    assert (await http.respond("/v1/completions/", {"prompt": "a"}, "fox"))["choices"]
    response = await http.client.get("/v1/requests/r/events", headers={"last-event-id": "x"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "Last-Event-ID"


async def test_a_gateway_that_drains_refuses_new_requests(http: Http) -> None:
    server = http.stack.gateway.http
    assert server is not None
    sending = http.start("/v1/completions", {"prompt": "The"})
    sent = await http.submission()
    limits = http.stack.gateway.live_limits
    draining = asyncio.create_task(http.stack.gateway.drain())
    await until(lambda: limits.is_stopping, "the refusal")
    status, error = await http.error("/v1/completions", {"prompt": "The"})
    assert (status, error["code"]) == (503, "stopping")
    assert (await http.client.get("/health")).status_code == 200
    ids = http.stack.encode("fox")
    http.stack.scheduler.accept(sent)
    http.stack.scheduler.write(sent, 0, ids)
    http.stack.scheduler.end(sent, len(ids))
    assert (await sending).status_code == 200
    await draining


async def test_a_full_gateway_says_when_to_retry(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http.stack.gateway.live_limits, "_max_calls", 0)
    response = await http.client.post("/v1/completions", json={"prompt": "x"})
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    assert response.json()["error"]["code"] == "too_many_calls"


@pytest.mark.parametrize(
    ("code", "reason", "status"),
    [
        (grpc.StatusCode.INTERNAL, "POISON", 500),
        (grpc.StatusCode.ALREADY_EXISTS, "REQUEST_ID_TAKEN", 409),
        (grpc.StatusCode.INTERNAL, "ROW_FAILED", 500),
    ],
)
async def test_clients_do_not_repeat_a_request_that_can_only_fail_again(
    http: Http, code: grpc.StatusCode, reason: str, status: int
) -> None:
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason=reason, domain="quire"))
    num_attempts = 0

    async def refuse() -> None:
        nonlocal num_attempts
        for _ in range(3):
            sent = await http.submission()
            num_attempts += 1
            http.stack.scheduler.fail(sent, code, details=[detail])

    refusing = asyncio.create_task(refuse())
    assert http.stack.gateway.http is not None
    url = f"http://{http.stack.gateway.http.address}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=1) as client:
        with pytest.raises(openai.APIStatusError) as raised:
            await client.completions.create(model="tiny", prompt="The")
    refusing.cancel()
    assert (raised.value.status_code, raised.value.code) == (status, reason.lower())
    assert num_attempts == (2 if reason == "ROW_FAILED" else 1)


def test_positions_are_read_as_written() -> None:
    event_id = EventId()
    event_id.open(1, 2)
    assert str(event_id) == "-,0*2"
    event_id.open(0, 2)
    event_id.advance(1, ChoiceUpdate(1, "", (1, 2), 3, None))
    assert str(event_id) == "0*2,0.5"
    again = EventId.parse("e.7,-x2,3*3")
    assert str(again) == "e.7,-x2,3*3"
    assert (again.next_indices(0), again.next_indices(1)) == ([0, 7], [])
    assert again.next_indices(3) == [3] * 3
    # As ids were written before repetitions.
    assert str(EventId.parse("12e.7,-,-")) == "e.7,-x2"
    assert (again.has_end(0, 0), again.has_end(0, 1), again.has_end(5, 0)) == (True, False, False)
    for text in ("", "1.", ",", "1e2", "9999999999", "-1", "1 ", "1x2*2"):
        with pytest.raises(RequestError):
            EventId.parse(text)
    # No request has as many choices or prompts, or none.
    for text in ("1*17", "1.2*16", "-x1025", "-,-x1024", "1*0", "-x0"):
        with pytest.raises(RequestError):
            EventId.parse(text)


def test_the_length_of_an_event_id_depends_on_the_choices_that_run() -> None:
    """4,096 choices, of which 64 run, at indices that differ; read again, each id is the same."""
    event_id = EventId()
    prompts, choices, running = 512, 8, 64
    longest = 0
    for at in range(prompts * choices):
        prompt, choice = divmod(at, choices)
        event_id.open(prompt, choices)
        event_id.advance(prompt, ChoiceUpdate(choice, "", (1,), 99 + at % 61, None))
        if (ended := at - running) >= 0:
            end = ChoiceUpdate(ended % choices, "", (), 0, ChoiceEnd(0))
            event_id.advance(ended // choices, end)
        if at % 40 == 0:
            longest = max(longest, len(str(event_id)))
            assert str(EventId.parse(str(event_id))) == str(event_id)
    assert longest < 64 * len("123,") + 32


async def test_the_first_error_of_a_source_ends_all() -> None:
    closed = []

    async def endless(number: int):
        try:
            while True:
                yield number
                await asyncio.sleep(0)
        finally:
            closed.append(number)

    async def failing():
        yield 0
        raise ValueError("no")

    merge = Merge[int]()
    merge.add(endless(1))
    merge.add(endless(2))
    merge.add(failing())
    with pytest.raises(ValueError, match="no"):
        async for _ in merge.items():
            pass
    assert sorted(closed) == [1, 2]


async def test_merged_sources_that_fail_when_they_are_closed_end() -> None:
    """As a request that the scheduler fails at the moment at which its client disconnects."""

    async def failing_at_the_end():
        yield 0
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ValueError("no") from None

    merge = Merge[int]()
    merge.add(failing_at_the_end())
    merge.add(failing_at_the_end())
    items = merge.items()
    assert [await anext(items), await anext(items)] == [0, 0]
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await items.aclose()


def _overflowing(overflow: asyncio.Event) -> AsyncGenerator[int, None]:
    """Two items of a request whose stream overflows later, which cancels its task."""

    async def source() -> AsyncGenerator[int, None]:
        task = asyncio.current_task()
        assert task is not None

        async def cancel() -> None:
            await overflow.wait()
            task.cancel()

        cancelling = asyncio.create_task(cancel())
        try:
            yield 0
            yield 1
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ValueError("slow") from None
        finally:
            cancelling.cancel()

    return source()


@pytest.mark.parametrize("num_read", [1, 2])
async def test_a_slow_reader_of_merged_sources_is_cancelled(num_read: int) -> None:
    """In its write, while its source waits to be read or for the next event. Sources that overflow
    at the same moment cancel it once."""
    overflow, merge = asyncio.Event(), Merge[int]()
    num_sources = 2
    for _ in range(num_sources):
        merge.add(_overflowing(overflow))

    async def read() -> None:
        async with aclosing(merge.items()) as items:
            for _ in range(num_read * num_sources):
                await anext(items)
            # A write that blocks.
            await asyncio.Event().wait()

    reader = asyncio.create_task(read())
    for _ in range(10):
        await asyncio.sleep(0)
    overflow.set()
    async with asyncio.timeout(5):
        await asyncio.wait({reader})
    assert reader.cancelled()
    assert reader.cancelling() == 1


async def test_a_reader_that_waits_gets_the_error_of_a_source_that_overflows() -> None:
    overflow, merge = asyncio.Event(), Merge[int]()
    merge.add(_overflowing(overflow))
    async with asyncio.timeout(5), aclosing(merge.items()) as items:
        assert [await anext(items), await anext(items)] == [0, 1]
        asyncio.get_running_loop().call_soon(overflow.set)
        with pytest.raises(ValueError, match="slow"):
            await anext(items)


async def test_a_grpc_client_at_the_http_port_ends_with_a_hint(http: Http) -> None:
    """Without a limit on its retries."""
    assert http.stack.gateway.http is not None
    address = http.stack.gateway.http.address

    def list_models() -> None:
        with Client(address, resume_timeout_s=math.inf) as client:
            client.list_models()

    def stream() -> None:
        with Client(address, resume_timeout_s=math.inf) as client:
            list(client.stream_generate("x"))

    async def generate() -> None:
        async with AsyncClient(address, resume_timeout_s=math.inf) as client:
            await client.generate("x")

    for call in (asyncio.to_thread(list_models), asyncio.to_thread(stream), generate()):
        with pytest.raises(UnavailableError, match="a server of HTTP/1") as caught:
            await call
        assert "use the address for gRPC" in caught.value.message
        assert not caught.value.resumable
