"""Requests that a worker finds to be invalid, after the gateway has accepted them."""

import asyncio
from typing import Any

import grpc
import pytest
from gateway_stack import Stack, field_of
from grpc_status import rpc_status
from http_client import Http

from quire.internal.v1 import scheduler_pb2
from quire.service.errors import invalid
from quire.v1 import inference_pb2

SCHEMA = "sampling_params.structured_output.json_schema"
DESCRIPTION = "has reached a limit"
CODE = "format_too_complex"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "structured_outputs": {"json": {"type": "object"}}},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "x"}],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"type": "object"}},
        },
    },
    "/v1/responses": {
        "input": "x",
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
    },
}
PARAMS = {
    "/v1/completions": "structured_outputs.json",
    "/v1/chat/completions": "response_format.json_schema.schema",
    "/v1/responses": "text.format.schema",
}


def fail(stack: Stack, request: Any, opaque: bytes = b"") -> None:
    """Send the error that a scheduler makes of a worker's failure."""
    error = invalid(SCHEMA, CODE.upper(), DESCRIPTION)
    failure = scheduler_pb2.RequestFailure(
        attachment=request.attachment,
        code=error.code.value[0],
        message=error.message,
        details=error.packed_details(),
        opaque=opaque or request.opaque,
    )
    stack.scheduler.send(failures=[failure])


def check(error: dict[str, Any], path: str) -> None:
    assert error["type"] == "invalid_request_error"
    assert (error["param"], error["code"]) == (PARAMS[path], CODE)
    assert error["message"] == f"{PARAMS[path]}: {DESCRIPTION}"


@pytest.mark.parametrize("path", BODIES)
async def test_over_http_the_field_has_the_name_of_the_body(http: Http, path: str) -> None:
    sending = http.start(path, BODIES[path])
    sent = await http.submission()
    http.stack.scheduler.accept(sent)
    http.stack.scheduler.write(sent, 0, http.stack.encode("{"))
    fail(http.stack, sent)
    response = await sending
    assert response.status_code == 400
    check(response.json()["error"], path)


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_and_its_resumption_elsewhere_end_with_the_error(
    http: Http, path: str
) -> None:
    async with http.stream(path, {**BODIES[path], "stream": True}, x_request_id="r") as events:
        sent = await http.submission()
        http.stack.scheduler.accept(sent)
        http.stack.scheduler.write(sent, 0, http.stack.encode("{"))
        await events.next()
        fail(http.stack, sent)
        last = (await events.rest())[-1]
    check(last.json()["error"], path)

    getting = asyncio.create_task(http.client.get("/v1/requests/r/events"))
    fail(http.stack, await http.stack.scheduler.attachments.get(), sent.opaque)
    response = await getting
    assert response.status_code == 400
    check(response.json()["error"], path)


async def test_a_response_in_the_background_has_it(http: Http) -> None:
    path = "/v1/responses"
    sending = http.start(path, {**BODIES[path], "background": True}, x_request_id="r")
    sent = await http.submission()
    http.stack.scheduler.accept(sent)
    await sending
    getting = asyncio.create_task(http.client.get(f"{path}/resp_r"))
    fail(http.stack, await http.stack.scheduler.attachments.get(), sent.opaque)
    response = (await getting).json()
    assert response["status"] == "failed"
    message = f"{PARAMS[path]}: {DESCRIPTION}"
    assert response["error"] == {"code": "invalid_prompt", "message": message}


async def test_over_grpc_the_field_is_that_of_the_message(stack: Stack) -> None:
    output = {"json_schema": '{"type": "object"}'}
    parts: dict[str, Any] = {"text": "The", "sampling_params": {"structured_output": output}}
    request = inference_pb2.GenerateRequest(**parts)
    unary = asyncio.ensure_future(stack.inference.Generate(request))
    submission = await stack.scheduler.submissions.get()
    stack.scheduler.accept(submission)
    fail(stack, submission)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await unary
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field_of(caught.value) == SCHEMA

    # A request to resume has no such field.
    resumed = stack.inference.ResumeGenerate(inference_pb2.ResumeGenerateRequest(request_id="a"))
    fail(stack, await stack.scheduler.attachments.get(), submission.opaque)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await resumed.read()
    assert refused.value.details() == f"{SCHEMA}: {DESCRIPTION}"
    status = rpc_status.from_call(refused.value)
    assert status is not None
    assert [detail.TypeName() for detail in status.details] == ["google.rpc.ErrorInfo"]
