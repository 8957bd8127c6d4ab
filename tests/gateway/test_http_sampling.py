"""Fields of HTTP bodies that change logits or give a format, and the messages they become."""

import json
from typing import Any

import pytest
from google.protobuf import json_format
from http_client import Http
from pydantic import ValidationError

from gateway_svc.http.bodies.chat import ChatRequest
from gateway_svc.http.bodies.completion import CompletionRequest
from gateway_svc.http.bodies.fields import HttpRequest
from gateway_svc.http.bodies.response import ResponseRequest
from gateway_svc.http.errors import to_http
from quire.internal.v1 import logits_pb2
from quire.service.errors import RequestError, invalid
from quire.v1 import inference_pb2 as pb
from quire.v1.structured_output_pb2 import StructuredOutput

FIELDS = {
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.5,
    "min_tokens": 2,
    "logit_bias": {"7": -100, "9": 2.5},
    "allowed_token_ids": [4, 5],
    "bad_words": ["x", "y"],
    "truncate_prompt_tokens": 9,
    "typical_p": 0.75,
    "logprobs_mode": "processed",
    "processor_args": {"mine": {"strength": 2.0}},
    "speculation": False,
}
BODIES: dict[str, tuple[type[HttpRequest], dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, {"prompt": "x"}),
    "/v1/chat/completions": (ChatRequest, {"messages": [{"role": "user", "content": "x"}]}),
    "/v1/responses": (ResponseRequest, {"input": "x"}),
}
SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}}
TAG = {"structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}], "triggers": ["<a"]}


def params_of(path: str, change: dict[str, Any]) -> pb.SamplingParams:
    kind, base = BODIES[path]
    body: Any = kind.model_validate({**base, **change})
    [message] = body.messages("r") if path == "/v1/completions" else [body.message("r")]
    assert isinstance(message.sampling_params, pb.SamplingParams)
    return message.sampling_params


@pytest.mark.parametrize("path", BODIES)
def test_every_body_has_the_fields(path: str) -> None:
    params = params_of(path, FIELDS)
    set_fields = {field.name for field, _ in params.ListFields()} - {"max_tokens"}
    assert set_fields == set(FIELDS)
    penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
    assert penalties == (0.5, -0.5, 1.5)
    assert dict(params.logit_bias) == {7: -100.0, 9: 2.5}
    assert list(params.allowed_token_ids.ids) == [4, 5]
    assert list(params.bad_words) == ["x", "y"]
    assert (params.min_tokens, params.truncate_prompt_tokens, params.typical_p) == (2, 9, 0.75)
    assert params.logprobs_mode == pb.LOGPROBS_MODE_PROCESSED
    assert not params.speculation
    assert json_format.MessageToDict(params.processor_args) == FIELDS["processor_args"]


@pytest.mark.parametrize("path", BODIES)
def test_absent_and_empty_fields_are_not_sent(path: str) -> None:
    names = [*FIELDS, *(() if path == "/v1/responses" else ("response_format", "detokenize"))]
    params = params_of(path, dict.fromkeys(names))
    assert {field.name for field, _ in params.ListFields()} <= {"max_tokens"}
    params = params_of(path, {"logit_bias": {}, "bad_words": [], "processor_args": {}})
    assert {field.name for field, _ in params.ListFields()} <= {"max_tokens"}


@pytest.mark.parametrize("path", BODIES)
def test_minus_one_keeps_as_many_tokens_as_the_context_takes(path: str) -> None:
    assert params_of(path, {"truncate_prompt_tokens": -1}).truncate_prompt_tokens == 2**32 - 1


def json_schema(schema: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    if schema is not None:
        fields["schema"] = schema
    return {"type": "json_schema", "json_schema": {"name": "n", **fields}}


FORMATS = {
    "text": ({"response_format": {"type": "text"}}, None, None),
    "object": ({"response_format": {"type": "json_object"}}, "json_object", None),
    "schema": ({"response_format": json_schema(SCHEMA)}, "json_schema", SCHEMA),
    "schema of huggingface_hub": (
        {"response_format": {"type": "json_object", "value": SCHEMA}},
        "json_schema",
        SCHEMA,
    ),
    "strict schema": (
        {"response_format": json_schema(SCHEMA, strict=True, description="d")},
        "json_schema",
        SCHEMA,
    ),
    "a schema of any value": (
        {"response_format": json_schema(True)},  # type: ignore[arg-type]
        "json_schema",
        True,
    ),
    "vLLM's schema of any value": ({"structured_outputs": {"json": True}}, "json_schema", True),
    "tag": (
        {"response_format": {"type": "structural_tag", **TAG}},
        "structural_tag",
        {"type": "structural_tag", **TAG},
    ),
    "vLLM's schema": ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA),
    "vLLM's schema as a text": (
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        "json_schema",
        SCHEMA,
    ),
    "vLLM's object": ({"structured_outputs": {"json_object": True}}, "json_object", None),
    "vLLM's regex": ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
    "vLLM's choice": ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", None),
    "vLLM's grammar": ({"structured_outputs": {"grammar": 'start: "a"'}}, "grammar", 'start: "a"'),
    "vLLM's tag": (
        {"structured_outputs": {"structural_tag": json.dumps(TAG)}},
        "structural_tag",
        TAG,
    ),
    "options that change nothing": (
        {
            "structured_outputs": {
                "regex": "a+",
                "disable_fallback": False,
                "disable_any_whitespace": False,
                "whitespace_pattern": None,
            }
        },
        "regex",
        "a+",
    ),
    "a format that is none": (
        {"response_format": {"type": "text"}, "structured_outputs": {"regex": "a+"}},
        "regex",
        "a+",
    ),
}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_format_becomes_a_structured_output(path: str, name: str) -> None:
    change, field, value = FORMATS[name]
    check_format(params_of(path, change), field, value)


def check_format(params: pb.SamplingParams, field: str | None, value: Any) -> None:
    if field is None:
        assert not params.HasField("structured_output")
        return
    message = params.structured_output
    assert message.WhichOneof("format") == field
    if field == "choice":
        assert list(message.choice.texts) == ["a", "b"]
    elif value is not None:
        found = getattr(message, field)
        assert (found if isinstance(value, str) else json.loads(found)) == value


@pytest.mark.parametrize(
    ("format_", "field", "value"),
    [
        (None, None, None),
        ({"type": "text"}, None, None),
        ({"type": "json_object"}, "json_object", None),
        ({"type": "json_schema", "name": "n", "schema": SCHEMA}, "json_schema", SCHEMA),
        (
            {
                "type": "json_schema",
                "name": "n",
                "schema": SCHEMA,
                "strict": True,
                "description": "d",
            },
            "json_schema",
            SCHEMA,
        ),
    ],
    ids=str,
)
def test_the_format_of_a_response(format_: Any, field: str | None, value: Any) -> None:
    change = {"text": {"format": format_}}
    check_format(params_of("/v1/responses", change), field, value)
    body = ResponseRequest.model_validate({"input": "x", **change})
    assert body.response("tiny")["text"] == {"format": format_ or {"type": "text"}}


REFUSED = {
    "bias of a text": ({"logit_bias": {"a": 1}}, "logit_bias", "keys are token ids"),
    "bias of a negative id": ({"logit_bias": {"-1": 1}}, "logit_bias", "keys are token ids"),
    "bias of a large id": ({"logit_bias": {str(2**32): 1}}, "logit_bias", "keys are token ids"),
    "bias of other digits": ({"logit_bias": {"٣": 1}}, "logit_bias", "keys are token ids"),
    "deep arguments": (
        {"processor_args": {"a": json.loads("[" * 30 + "]" * 30)}},
        "processor_args",
        "more than 24 levels",
    ),
}
REFUSED_FORMATS = {
    "two fields": (
        {"response_format": json_schema(SCHEMA), "structured_outputs": {"regex": "a"}},
        "structured_outputs",
        "and so is response_format",
    ),
    "no format": ({"structured_outputs": {}}, "structured_outputs", "has 0 formats"),
    "two formats": (
        {"structured_outputs": {"regex": "a", "json_object": True}},
        "structured_outputs",
        "has 2 formats",
    ),
    "schema of an object": (
        {"response_format": {"type": "json_object", "json_schema": {"name": "n"}}},
        "response_format.json_schema",
        "json_schema alone",
    ),
    "value of a schema": (
        {"response_format": {**json_schema(SCHEMA), "value": {}}},
        "response_format.value",
        "json_object alone",
    ),
    "no json_schema": (
        {"response_format": {"type": "json_schema"}},
        "response_format.json_schema",
        "is required",
    ),
    "triggers of an object": (
        {"response_format": {"type": "json_object", "triggers": ["a"]}},
        "response_format.triggers",
        "structural_tag alone",
    ),
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_field_is_named(path: str, name: str) -> None:
    check_refused(path, *REFUSED[name])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("name", REFUSED_FORMATS)
def test_a_wrong_format_is_named(path: str, name: str) -> None:
    check_refused(path, *REFUSED_FORMATS[name])


def check_refused(path: str, change: dict[str, Any], param: str, part: str) -> None:
    with pytest.raises(RequestError) as caught:
        params_of(path, change)
    error = to_http(caught.value).body["error"]
    assert error["param"] == param
    assert part in error["message"]


INVALID_FIELDS: list[tuple[str, dict[str, Any], str, str | None]] = [
    ("/v1/completions", {"logit_bias": {"5": "1"}}, "logit_bias[5]", "invalid_field"),
    ("/v1/completions", {"logit_bias": {"5": 1, "05": 1}}, "logit_bias", "invalid_field"),
    ("/v1/completions", {"logit_bias": {"-0": 1}}, "logit_bias", "invalid_field"),
    ("/v1/completions", {"presence_penalty": 3}, "presence_penalty", None),
    ("/v1/completions", {"min_tokens": 17}, "min_tokens", None),
    ("/v1/completions", {"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", None),
    ("/v1/completions", {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", None),
    ("/v1/completions", {"guided_json": {}}, "guided_json", "unsupported_field"),
    ("/v1/completions", {"request_id": "r"}, "request_id", "unsupported_field"),
    ("/v1/completions", {"truncation_side": "right"}, "truncation_side", "unsupported_field"),
    ("/v1/completions", {"detokenize": False, "stop": "a"}, "stop", "stop_without_text"),
    (
        "/v1/completions",
        {"structured_outputs": {"whitespace_pattern": " "}},
        "structured_outputs.whitespace_pattern",
        "unsupported_field",
    ),
    (
        "/v1/chat/completions",
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "response_format.json_schema.name",
        "missing_field",
    ),
    (
        "/v1/chat/completions",
        {"response_format": json_schema(5)},  # type: ignore[arg-type]
        "response_format.json_schema.schema",
        "invalid_field",
    ),
    (
        "/v1/chat/completions",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
        "response_format.json_schema.schema",
        "missing_field",
    ),
    (
        "/v1/chat/completions",
        {"response_format": json_schema(False)},  # type: ignore[arg-type]
        "response_format.json_schema.schema",
        "invalid_schema",
    ),
    ("/v1/responses", {"reasoning": {"effort": "maximum"}}, "reasoning.effort", "invalid_field"),
    (
        "/v1/responses",
        {"text": {"format": {"type": "json_schema", "name": "n"}}},
        "text.format.schema",
        "missing_field",
    ),
    (
        "/v1/responses",
        {"text": {"format": {"type": "json_schema"}}},
        "text.format.name",
        "missing_field",
    ),
    (
        "/v1/responses",
        {"text": {"format": {"type": "text", "strict": True}}},
        "text.format.strict",
        "invalid_field",
    ),
    ("/v1/responses", {"presence_penalty": "a"}, "presence_penalty", "invalid_field"),
]


async def test_the_client_s_name_of_an_invalid_field(http: Http) -> None:
    for path, change, param, code in INVALID_FIELDS:
        status, error = await http.error(path, {**BODIES[path][1], **change})
        assert (status, error["param"]) == (400, param)
        if code is not None:
            assert error["code"] == code


@pytest.mark.parametrize(
    ("body", "field", "param"),
    [
        (
            {"response_format": json_schema(SCHEMA)},
            "json_schema",
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "json_object"}}, "json_object", "response_format"),
        (
            {"response_format": {"type": "json_object", "value": SCHEMA}},
            "json_schema",
            "response_format.value",
        ),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", "structured_outputs.json"),
        ({"structured_outputs": {"regex": "("}}, "regex", "structured_outputs.regex"),
        (
            {"structured_outputs": {"choice": ["("]}},
            "choice.texts[0]",
            "structured_outputs.choice.texts[0]",
        ),
    ],
    ids=str,
)
def test_errors_of_a_format_name_the_field_of_the_body(
    body: dict[str, Any], field: str, param: str
) -> None:
    request = ChatRequest.model_validate({**BODIES["/v1/chat/completions"][1], **body})
    assert field.split(".")[0] in StructuredOutput.DESCRIPTOR.fields_by_name
    error = invalid(f"sampling_params.structured_output.{field}", "X", "is wrong")
    found = to_http(error, request.format_names).body["error"]
    assert (found["param"], found["message"]) == (param, f"{param}: is wrong")


def test_unknown_options_of_a_format_are_refused() -> None:
    for change in ({"response_format": {"type": "text", "x": 1}}, {"structured_outputs": {"x": 1}}):
        with pytest.raises(ValidationError):
            params_of("/v1/completions", change)


async def test_changes_of_logits_reach_the_scheduler(http: Http) -> None:
    changes = {
        "presence_penalty": 0.5,
        "logit_bias": {"7": -100, "5": 0},
        "min_tokens": 3,
        "stop_token_ids": [8],
        "ignore_eos": True,
        "allowed_token_ids": [9, 7],
    }
    sending = http.start("/v1/completions", {"prompt": "x", **changes})
    sent = await http.submission()
    eos = http.stack.gateway.served.get(None).files.eos_token_ids
    assert logits_pb2.LogitsParams.FromString(sent.params.logits_params) == logits_pb2.LogitsParams(
        presence_penalty=0.5,
        bias_token_ids=[7],
        biases=[-100],
        min_tokens=3,
        stop_token_ids=sorted([8, *eos]),
        allowed_token_ids=[9, 7],
    )
    sending.cancel()
    neutral = {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "min_tokens": 0}
    sending = http.start("/v1/completions", {"prompt": "x", "repetition_penalty": 1, **neutral})
    assert (await http.submission()).params.logits_params == b""
    sending.cancel()


async def test_a_truncated_prompt_is_its_own_echo(http: Http) -> None:
    prompt = "The quick brown fox"
    ids = http.stack.encode(prompt)[-2:]
    body = {"prompt": prompt, "echo": True, "truncate_prompt_tokens": 2}
    completion = await http.respond("/v1/completions", body, " jumps")
    kept = http.stack.gateway.served.get(None).vocabulary.decode(ids)
    assert completion["choices"][0]["text"] == f"{kept} jumps"
    assert completion["usage"]["prompt_tokens"] == 2


async def test_output_without_text_has_token_ids(http: Http) -> None:
    body = {"prompt": "The", "detokenize": False, "return_token_ids": True}
    [choice] = (await http.respond("/v1/completions", body, " fox"))["choices"]
    assert (choice["text"], choice["token_ids"]) == ("", http.stack.encode(" fox"))


@pytest.mark.parametrize(
    ("n", "most_output_tokens", "max_tokens"),
    [(None, None, 16), (5, None, 16), (None, 12, 12), (5, 12, 2), (13, 12, 1), (2, 99, 16)],
)
def test_the_default_of_completions_is_lowered_to_the_output_tokens_of_a_tenant(
    n: int | None, most_output_tokens: int | None, max_tokens: int
) -> None:
    body = CompletionRequest.model_validate({"prompt": "x", "n": n})
    [message] = body.messages("r", most_output_tokens)
    assert message.sampling_params.max_tokens == max_tokens
    # A request for more is refused, not changed.
    body = CompletionRequest.model_validate({"prompt": "x", "max_tokens": 50})
    [message] = body.messages("r", most_output_tokens)
    assert message.sampling_params.max_tokens == 50
