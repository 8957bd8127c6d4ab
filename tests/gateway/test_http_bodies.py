"""Bodies over HTTP that are invalid or incomplete: the errors, and what is logged."""

import asyncio
import gzip
import logging
import threading
from typing import Any

import pytest
from http_client import Http
from waiting import until

from gateway_svc.http.bodies.generation_fields import GenerationFields
from quire.v1 import inference_pb2

CHAT, RESPONSE = "/v1/chat/completions", "/v1/responses"
COMPLETION = "/v1/completions"
LARGEST = 2**32 - 1


def _message(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


@pytest.mark.parametrize(
    "sent",
    [
        b'Content-Length: 50\r\n\r\n{"a"',
        b"Transfer-Encoding: chunked\r\n\r\n5\r\n{",
        b'Transfer-Encoding: chunked\r\n\r\n4\r\n{"a"\r\nno length\r\n',
    ],
    ids=["length", "chunk", "malformed chunk"],
)
@pytest.mark.parametrize("path", [COMPLETION, CHAT, RESPONSE, "/tokenize"])
async def test_a_client_that_disconnects_within_its_body_is_no_error(
    http: Http,
    path: str,
    sent: bytes,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gateway = http.stack.gateway
    assert gateway.http is not None
    host, port = gateway.http.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST %s HTTP/1.1\r\nHost: x\r\n" % path.encode() + sent)
    await writer.drain()
    requests = gateway.http.requests
    if b"no length" in sent:
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
    else:
        await until(lambda: requests._num_live == 1, "the request is live")
    writer.close()
    await requests.wait_until_idle()
    # uvicorn logs a failure after the application has ended.
    await http.client.get("/health")
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
    printed = "".join(capsys.readouterr())
    assert "Traceback" not in printed
    assert "unexpectedly" not in printed


@pytest.mark.parametrize("body", ["[]", "null", "1", '"x"'])
async def test_a_body_of_another_type_is_refused(http: Http, body: str) -> None:
    for path in (COMPLETION, CHAT, RESPONSE):
        response = await http.client.post(path, content=body)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "body")
        assert error["message"] == "body: must be a JSON object"


ACCEPTED: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETION, {"seed": 2**64}, f"seed: must be below {2**64}"),
    (COMPLETION, {"seed": -(2**63) - 1}, f"seed: must be at least {-(2**63)}"),
    (RESPONSE, {"seed": 2**64}, f"seed: must be below {2**64}"),
    (COMPLETION, {"n": 2**70}, f"n: must be at most {LARGEST}"),
    (COMPLETION, {"n": 1e30}, "n: must be an integer"),
    (COMPLETION, {"prompt": [2**70]}, f"prompt[0]: must be at most {LARGEST}"),
    (COMPLETION, {"prompt": [-1]}, "prompt[0]: must be at least 0"),
    (COMPLETION, {"prompt": [True]}, "prompt[0]: must be an integer, a string or an array"),
    (COMPLETION, {"prompt": [1.5]}, "prompt[0]: must be an integer, a string or an array"),
    (COMPLETION, {"prompt": [1, "x"]}, "prompt[1]: must be an integer"),
    (COMPLETION, {"prompt": ["x", 1]}, "prompt[1]: must be a string or an array"),
    (COMPLETION, {"prompt": [["x"]]}, "prompt[0][0]: must be an integer"),
    (COMPLETION, {"prompt": 5}, "prompt: must be a string or an array"),
    (COMPLETION, {"prompt": None}, "prompt: must be a string or an array"),
    (COMPLETION, {"prompt": []}, "prompt: has 0 entries; at least 1 is needed"),
    (
        COMPLETION,
        {"prompt": ["x"] * 1025},
        "prompt: has 1025 entries; at most 1024 are allowed",
    ),
    (COMPLETION, {"stop": {"a": 1}}, "stop: must be a string or an array"),
    (COMPLETION, {"stop": ["a", 1]}, "stop[1]: must be a string"),
    (COMPLETION, {"logit_bias": {"5": None}}, "logit_bias[5]: must be a number"),
    (COMPLETION, {"logit_bias": {"a b": "x"}}, "logit_bias['a b']: must be a number"),
    (COMPLETION, {"early_stopping": 5}, "early_stopping: must be a boolean or 'never'"),
    (COMPLETION, {"a b": 5}, "['a b']: is not a field of this request; remove it"),
    (
        COMPLETION,
        {"structured_outputs": {"json": 5}},
        "structured_outputs.json: must be a string, an object or a boolean",
    ),
    (CHAT, {"messages": []}, "messages: has 0 entries; at least 1 is needed"),
    (CHAT, _message(5), "messages[0].content: must be a string or an array"),
    (CHAT, _message([{"type": "text"}]), "messages[0].content[0].text: is required"),
    (CHAT, {"metadata": {"Str": 5}}, "metadata.Str: must be a string"),
    (
        CHAT,
        {"tool_choice": "x"},
        "tool_choice: must be 'none', 'auto', 'required' or an object",
    ),
    (RESPONSE, {"input": []}, "input: has 0 entries; at least 1 is needed"),
    (RESPONSE, {"input": 5}, "input: must be a string or an array"),
    (RESPONSE, {"input": [5]}, "input[0]: must be an object"),
    (RESPONSE, {"input": [{"role": "user"}]}, "input[0].content: is required"),
    (RESPONSE, {"input": [{"type": "function_call"}]}, "input[0].call_id: is required"),
    (
        RESPONSE,
        {"input": [{"type": "x"}]},
        "input[0].type: must be 'message', 'function_call', 'function_call_output' or 'reasoning'",
    ),
    (COMPLETION, {"temperature": 1e308}, "temperature: must be 0 or more, and finite"),
    (COMPLETION, {"top_p": 1e-300}, "top_p: must be above 0 and at most 1"),
    (COMPLETION, {"top_p": 1.5}, "top_p: is 1.5; must be above 0 and at most 1"),
]


async def test_an_error_names_what_is_accepted(http: Http) -> None:
    for path, change, message in ACCEPTED:
        whole = {COMPLETION: {"prompt": "x"}, CHAT: _message("x"), RESPONSE: {"input": "x"}}[path]
        status, error = await http.error(path, {**whole, **change})
        assert (status, error["message"]) == (400, message)
        assert error["param"] == message.partition(": ")[0]


HUGE = f"1{'0' * 400}"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (f'"top_k": {HUGE}', f"top_k: must be at most {LARGEST}"),
        (f'"seed": -{HUGE}', f"seed: must be at least {-(2**63)}"),
        (f'"stop_token_ids": [{HUGE}]', f"stop_token_ids[0]: must be at most {LARGEST}"),
        (f'"unknown": {HUGE}', "unknown: is not a field of this request; remove it"),
        ('"temperature": -1e999', "temperature: must be finite"),
        ('"logit_bias": {"5": 1e999}', "logit_bias[5]: must be finite"),
        ('"\\ud800": 1', "body: has half of a surrogate pair, which is no character"),
    ],
)
async def test_an_error_names_the_field_of_a_value_that_no_double_or_utf8_has(
    http: Http, fields: str, message: str
) -> None:
    response = await http.client.post(COMPLETION, content=f'{{"prompt": "x", {fields}}}')
    error = response.json()["error"]
    assert (response.status_code, error["message"]) == (400, message)
    assert error["param"] == message.partition(": ")[0]


@pytest.mark.parametrize(
    "value",
    [
        f'"processor_args": {{"a": {HUGE}}}',
        f'"top_k": 1{HUGE * 11}',
        '"top_k": NaN, "temperature": "x"',
        '"stop": ["a", "\\ud800"]',
        f'"user": {"[" * 9999}{"]" * 9999}',
    ],
    ids=["in an object of any values", "5,000 digits", "NaN", "half a pair", "deep"],
)
async def test_values_that_cannot_be_read_are_refused(http: Http, value: str) -> None:
    response = await http.client.post(COMPLETION, content=f'{{"prompt": "x", {value}}}')
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "malformed_json"), error
    assert error["message"].startswith("the body cannot be read as JSON: ")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"prompt": "\xe9"}', "the body is not UTF-8: byte 12 is 0xe9"),
        ('{"prompt": "x"}'.encode("utf-16"), "the body is UTF-16; send UTF-8"),
        ('{"prompt": "x"}'.encode("utf-16-le"), "the body is UTF-16-LE; send UTF-8"),
        (gzip.compress(b'{"prompt": "x"}'), "the body is not UTF-8: byte 1 is 0x8b"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_body_that_is_not_utf8_is_refused(http: Http, body: bytes, message: str) -> None:
    response = await http.client.post(COMPLETION, content=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "malformed_json")
    assert error["message"] == message


async def test_a_compressed_body_is_refused(http: Http) -> None:
    body = gzip.compress(b'{"prompt": "x"}')
    for encoding in ("gzip", "identity, GZIP"):
        response = await http.client.post(
            COMPLETION, content=body, headers={"content-encoding": encoding}
        )
        assert response.status_code == 415
        error = response.json()["error"]
        assert (error["param"], error["type"]) == ("Content-Encoding", "invalid_request_error")
        assert "gzip" in error["message"].lower()
    response = await http.client.post(
        "/tokenize", content=b'{"prompt": "x"}', headers={"content-encoding": "identity"}
    )
    assert response.status_code == 200


@pytest.mark.parametrize("path", [COMPLETION, CHAT, RESPONSE])
async def test_a_large_body_is_converted_beside_the_event_loop(
    http: Http, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    fill = GenerationFields.fill_params

    def recorded(self: GenerationFields, params: inference_pb2.SamplingParams) -> None:
        threads.append(threading.current_thread())
        fill(self, params)

    monkeypatch.setattr(GenerationFields, "fill_params", recorded)
    prompt = {COMPLETION: {"prompt": "x"}, CHAT: _message("x"), RESPONSE: {"input": "x"}}[path]
    biases = {str(token_id): 1 for token_id in range(5000)}
    status, error = await http.error(path, {**prompt, "logit_bias": biases})
    assert (status, error["param"], error["code"]) == (400, "logit_bias", "too_many_biases")
    assert threads
    assert threading.main_thread() not in threads


async def test_json_that_is_nested_too_deeply_is_refused_by_name(http: Http) -> None:
    """orjson reads 1,024 levels and writes 254."""
    deep: Any = {}
    for _ in range(300):
        deep = {"a": deep}
    function = {"name": "f", "parameters": deep}
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": deep}}
    for path, field, change in (
        (COMPLETION, "structured_outputs.json", {"structured_outputs": {"json": deep}}),
        (
            COMPLETION,
            "structured_outputs.structural_tag",
            {"structured_outputs": {"structural_tag": deep}},
        ),
        (
            COMPLETION,
            "response_format.format",
            {"response_format": {"type": "structural_tag", "format": deep}},
        ),
        (CHAT, "response_format.json_schema.schema", {"response_format": schema}),
        (
            CHAT,
            "tools[0].function.parameters",
            {"tools": [{"type": "function", "function": function}]},
        ),
        (RESPONSE, "tools[0].parameters", {"tools": [{"type": "function", **function}]}),
        (
            RESPONSE,
            "text.format.schema",
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": deep}}},
        ),
    ):
        prompt = {COMPLETION: {"prompt": "x"}, CHAT: _message("x"), RESPONSE: {"input": "x"}}
        status, error = await http.error(path, {**prompt[path], **change})
        assert (status, error["param"], error["code"]) == (400, field, "too_deep")
        assert error["message"] == f"{field}: is nested in more than 240 levels"
