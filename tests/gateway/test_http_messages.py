"""`/v1/messages` over HTTP, with Anthropic's official client."""

import asyncio
import functools
import json
import time
from collections.abc import Iterable, Iterator
from typing import Any

import anthropic
import grpc
import pytest
import tools_model
from anthropic import types
from anthropic.types import Message, message_create_params
from anthropic.types.beta import message_create_params as beta_params
from gateway_stack import Stack
from http_client import Http
from tools_model import ARGUMENTS, CALLS, FUNCTION, OUTPUT

from gateway_svc.access.tenant import Tenant
from gateway_svc.http.bodies import message, message_input
from gateway_svc.http.bodies.fields import HttpRequest
from quire.internal.v1 import scheduler_pb2
from quire.service.api_keys import hash_key

PATH = "/v1/messages"
COUNT = f"{PATH}/count_tokens"
USER: dict[str, Any] = {"role": "user", "content": "a"}
DEEP: dict[str, Any] = functools.reduce(lambda inner, _: {"a": inner}, range(64), {})
BODY: dict[str, Any] = {"max_tokens": 3, "messages": [USER]}
COUNTED: dict[str, Any] = {"messages": [USER]}
STOP = scheduler_pb2.END_REASON_STOP_TOKEN
TOOLS: list[dict[str, Any]] = [
    {
        "name": "weather",
        "description": "The weather.",
        "input_schema": FUNCTION["parameters"],
        "cache_control": {"type": "ephemeral"},
    },
    {"name": "now", "input_schema": {"type": "object"}, "type": "custom"},
]


@pytest.fixture
def tools(http: Http, monkeypatch: pytest.MonkeyPatch) -> Http:
    tools_model.use(http.stack, monkeypatch)
    return http


def _calls(number: int, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
    call = {"type": "tool_use", "name": "f", "input": arguments or {}}
    content = [{**call, "id": f"{at}"} for at in range(number)]
    return {"role": "assistant", "content": content}


def prompt_of(stack: Stack, sent: scheduler_pb2.Submission) -> str:
    return stack.gateway.served.get(None).vocabulary.decode(list(sent.prompt_token_ids))


async def write(http: Http, text: str, is_complete: bool = True) -> str:
    """Write the output of the next request; return its prompt."""
    scheduler, model = http.stack.scheduler, http.stack.gateway.served.get(None)
    ids = http.stack.encode(text)
    sent = await http.submission()
    scheduler.accept(sent)
    if is_complete:
        ids.append(model.files.eos_token_ids[0])
    for at, id_ in enumerate(ids):
        scheduler.write(sent, at, [id_])
    if is_complete:
        scheduler.end(sent, len(ids), STOP, stop_token_id=ids[-1])
    else:
        scheduler.end(sent, len(ids))
    return prompt_of(http.stack, sent)


async def prompt(http: Http, **body: Any) -> str:
    """The prompt of a request."""
    sending = http.start(PATH, {**BODY, **body})
    found = await write(http, "ok")
    response = await sending
    assert response.status_code == 200, response.text
    return found


def client_of(http: Http, key: str = "none") -> anthropic.AsyncAnthropic:
    assert http.stack.gateway.http is not None
    url = f"http://{http.stack.gateway.http.address}"
    return anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0)


async def test_a_message(http: Http) -> None:
    sending = http.start(PATH, {**BODY, "stop_sequences": ["."], "seed": 1}, x_request_id="r")
    sent = await http.submission()
    assert sent.params.max_tokens == 3
    ids = http.stack.encode("fox")
    http.stack.scheduler.accept(sent)
    http.stack.scheduler.write(sent, 0, ids)
    http.stack.scheduler.end(sent, len(ids), num_cached_prompt_tokens=2)
    response = await sending
    assert (response.headers["request-id"], response.headers["x-request-id"]) == ("r", "r")
    num_prompt_tokens = len(sent.prompt_token_ids)
    assert response.json() == {
        "id": "msg_r",
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        # Without citations: a client may refuse null.
        "content": [{"type": "text", "text": "fox"}],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
        "usage": {
            "input_tokens": num_prompt_tokens - 2,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 2,
            "output_tokens": len(ids),
            "output_tokens_details": {"thinking_tokens": 0},
            "service_tier": "standard",
        },
    }
    # The client itself does not check that fields are there.
    Message.model_validate(response.json())


async def test_the_official_client_gets_thinking_text_and_calls(tools: Http) -> None:
    async with client_of(tools) as client:
        message, _ = await asyncio.gather(
            client.messages.create(
                model="tiny",
                max_tokens=500,
                messages=[USER],  # type: ignore[list-item]
                tools=TOOLS,  # type: ignore[arg-type]
            ),
            write(tools, OUTPUT),
        )
        thinking, text, weather, now = message.content
        assert (thinking.type, text.type, weather.type, now.type) == (
            "thinking",
            "text",
            "tool_use",
            "tool_use",
        )
        assert (thinking.thinking.strip(), text.text.strip()) == ("Why?", "So:")
        assert (weather.name, weather.input) == ("weather", {"city": "Bern"})
        assert (now.name, now.input) == ("now", {})
        assert (message.stop_reason, message.stop_sequence) == ("tool_use", None)
        # The client sends all of it back, with the results.
        results = [
            {"type": "tool_result", "tool_use_id": weather.id, "content": "warm"},
            {
                "type": "tool_result",
                "tool_use_id": now.id,
                "content": [{"type": "text", "text": "noon"}],
                "is_error": True,
            },
            {"type": "text", "text": "And?"},
        ]
        again, rendered = await asyncio.gather(
            client.messages.create(
                model="tiny",
                max_tokens=500,
                system=[{"type": "text", "text": "S"}, {"type": "text", "text": "T"}],
                messages=[
                    USER,  # type: ignore[list-item]
                    message.to_param(),
                    {"role": "user", "content": results},  # type: ignore[typeddict-item]
                ],
                tools=TOOLS,  # type: ignore[arg-type]
            ),
            write(tools, "ok"),
        )
    assert again.content[0].text == "ok"
    assert again.stop_reason == "end_turn"
    assert "<|system|>S\nT" in rendered
    assert "<think>Why?" in rendered
    assert f'"arguments": {ARGUMENTS}' in rendered
    order = [f"warm={weather.id}", f"noon={now.id}", "<|user|>And?"]
    assert sorted(map(rendered.index, order)) == [rendered.index(part) for part in order]


async def test_the_official_client_assembles_a_stream(tools: Http) -> None:
    async with client_of(tools) as client:

        async def read() -> Any:
            async with client.messages.stream(
                model="tiny",
                max_tokens=500,
                messages=[USER],  # type: ignore[list-item]
                tools=TOOLS,  # type: ignore[arg-type]
            ) as stream:
                kinds = [event.type async for event in stream]
                return kinds, await stream.get_final_message()

        (kinds, message), _ = await asyncio.gather(read(), write(tools, OUTPUT))
    thinking, text, weather, now = message.content
    assert (thinking.thinking.strip(), text.text.strip()) == ("Why?", "So:")
    assert thinking.signature
    assert [(call.name, call.input) for call in (weather, now)] == [
        ("weather", {"city": "Bern"}),
        ("now", {}),
    ]
    assert message.stop_reason == "tool_use"
    assert message.usage.output_tokens_details.thinking_tokens > 0
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4


async def test_the_events_of_a_stream(http: Http) -> None:
    ids = http.stack.encode("a fox")
    async with http.stream(PATH, {**BODY, "stream": True}, x_request_id="r") as events:
        sent = await http.submission()
        http.stack.scheduler.accept(sent)
        for at, id_ in enumerate(ids):
            http.stack.scheduler.write(sent, at, [id_])
        http.stack.scheduler.end(sent, len(ids), num_cached_prompt_tokens=2)
        whole = await events.rest()
    # No `[DONE]`.
    assert [event.name for event in whole] == [event.json()["type"] for event in whole]
    names = list(dict.fromkeys(event.name for event in whole))
    assert names == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    started = whole[0].json()["message"]
    num_prompt_tokens = len(sent.prompt_token_ids)
    assert started["content"] == []
    assert started["stop_reason"] is None
    assert started["usage"]["input_tokens"] == num_prompt_tokens
    ended = whole[-2].json()
    assert ended["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert ended["usage"]["input_tokens"] == num_prompt_tokens - 2
    assert ended["usage"]["cache_read_input_tokens"] == 2
    assert _text(whole) == "a fox"
    # It resumes after each event with an id, in its format.
    for at, event in enumerate(whole):
        if event.id is None:
            continue
        async with http.stream("/v1/requests/r/events", None, last_event_id=event.id) as events:
            attachment = await http.stack.scheduler.attachments.get()
            http.stack.scheduler.accept(attachment, sent.opaque)
            http.stack.scheduler.write(attachment, 0, ids)
            http.stack.scheduler.end(attachment, len(ids))
            *rest, _ = await events.rest()
        assert _text(whole[: at + 1]) + _text(rest) == "a fox"
        assert [one.name for one in rest][-1:] == ([] if at == len(whole) - 1 else ["message_stop"])


def _text(events: list[Any]) -> str:
    deltas = [event.json()["delta"] for event in events if event.name == "content_block_delta"]
    return "".join(delta["text"] for delta in deltas)


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [(["!"], "fox!", ("stop_sequence", "!")), (["?"], "fox!", ("end_turn", None))],
)
async def test_stop_sequences(
    http: Http, stops: list[str], text: str, expected: tuple[str, str | None]
) -> None:
    sending = http.start(PATH, {**BODY, "stop_sequences": stops})
    await write(http, text)
    message = (await sending).json()
    assert (message["stop_reason"], message["stop_sequence"]) == expected


async def test_a_call_that_the_limit_has_cut_has_the_arguments_until_then(tools: Http) -> None:
    demanded = {"tools": TOOLS, "tool_choice": {"type": "any"}}
    sending = tools.start(PATH, {**BODY, **demanded})
    await write(tools, CALLS[: CALLS.index("Bern") + 2], is_complete=False)
    message = (await sending).json()
    assert message["stop_reason"] == "max_tokens"
    assert message["content"][-1]["input"] == {"city": "Be"}


async def test_arguments_may_have_integers_of_any_size(tools: Http) -> None:
    arguments = '{"city": 123456789012345678901234567890, "far": 1e400, "name": "\u00e9"}'
    sending = tools.start(PATH, {**BODY, "tools": TOOLS, "tool_choice": {"type": "any"}})
    await write(tools, CALLS.replace(ARGUMENTS, arguments))
    [call, _] = (await sending).json()["content"]
    assert call["input"] == {"city": 123456789012345678901234567890, "far": None, "name": "\u00e9"}


async def test_a_call_that_a_stop_sequence_has_cut_is_not_for_running(tools: Http) -> None:
    demanded = {
        "tools": TOOLS,
        "tool_choice": {"type": "any"},
        "stop_sequences": ['arguments": {}'],
    }
    sending = tools.start(PATH, {**BODY, **demanded})
    await write(tools, CALLS)
    message = (await sending).json()
    assert [block["name"] for block in message["content"]] == ["weather", "now"]
    assert message["stop_reason"] == "stop_sequence"


async def test_an_empty_output_has_no_blocks(http: Http) -> None:
    sending = http.start(PATH, BODY)
    await write(http, "")
    message = (await sending).json()
    assert (message["content"], message["stop_reason"]) == ([], "end_turn")


async def test_adjacent_messages_of_a_role_are_one(tools: Http) -> None:
    image_free = [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
    messages = [
        USER,
        {"role": "user", "content": image_free},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]},
        {"role": "assistant", "content": "d"},
        {"role": "user", "content": "e"},
    ]
    rendered = await prompt(tools, messages=messages)
    assert "<|user|>a\nb\nc" in rendered
    assert "<|assistant|>d" in rendered
    assert rendered.count("<|assistant|>") == 2


def test_adjacent_messages_are_joined_with_their_calls_and_thinking() -> None:
    def of_assistant(*content: dict[str, Any]) -> dict[str, Any]:
        return {"role": "assistant", "content": list(content)}

    def thinking(text: str) -> dict[str, Any]:
        return {"type": "thinking", "thinking": text}

    sent = [
        USER,
        of_assistant({"type": "text", "text": "b"}),
        of_assistant(thinking("c"), {"type": "tool_use", "id": "1", "name": "f", "input": {}}),
        of_assistant(thinking("d"), {"type": "tool_use", "id": "2", "name": "g", "input": {}}),
        of_assistant({"type": "text", "text": "e"}),
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1"}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "2"}]},
    ]
    messages = message_input.messages_of(
        [message_input.InputMessage.model_validate(one) for one in sent], None
    )
    assert [one.role for one in messages] == ["user", "assistant", "tool", "tool"]
    joined = messages[1]
    assert (joined.content, joined.reasoning) == ("b\ne", "c\nd")
    assert [call.name for call in joined.tool_calls] == ["f", "g"]


# Joined one after another, each time with a copy of all texts before, they take longer.
@pytest.mark.timeout(5)
def test_many_adjacent_messages_are_joined_in_linear_time() -> None:
    text = "x" * 2000
    message = message_input.InputMessage(role="user", content=text)
    [joined] = message_input.messages_of([message] * 4096, None)
    assert joined.content == "\n".join([text] * 4096)


async def test_a_system_message_at_the_beginning_continues_the_system_prompt(tools: Http) -> None:
    messages = [{"role": "system", "content": "T"}, USER]
    rendered = await prompt(tools, system="S", messages=messages)
    assert "<|system|>S\nT" in rendered
    assert rendered.count("<|system|>") == 1


async def test_names_of_tools_may_be_as_long_as_in_anthropics_api(tools: Http) -> None:
    name = "mcp__" + "n" * 123
    call = {"type": "tool_use", "id": "c", "name": name, "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c"}
    messages = [
        USER,
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    tool = {"name": name, "input_schema": {"type": "object"}}
    assert (await prompt(tools, messages=messages, tools=[tool])).count(name) == 2


async def test_the_assistants_last_message_is_continued(tools: Http) -> None:
    rendered = await prompt(tools, messages=[USER, {"role": "assistant", "content": "So ("}])
    assert rendered.endswith("<|assistant|>So (")


async def test_thinking_and_effort_set_variables_of_the_template(tools: Http) -> None:
    assert "<think></think>" in await prompt(tools, thinking={"type": "disabled"})
    enabled = {"type": "enabled", "budget_tokens": 1024}
    assert "<think></think>" not in await prompt(tools, thinking=enabled)
    assert (await prompt(tools, output_config={"effort": "high"})).endswith("high")
    sending = tools.start(PATH, {**BODY, "thinking": {"type": "adaptive", "display": "omitted"}})
    await write(tools, "<think>Why?</think>So.")
    content = (await sending).json()["content"]
    assert [block["type"] for block in content] == ["text"]


@pytest.mark.parametrize(
    ("choice", "is_offered", "is_single"),
    [
        ({"type": "auto"}, True, False),
        ({"type": "none"}, False, False),
        ({"type": "auto", "disable_parallel_tool_use": True}, True, True),
    ],
)
async def test_tool_choice(
    tools: Http, choice: dict[str, Any], is_offered: bool, is_single: bool
) -> None:
    sending = tools.start(PATH, {**BODY, "max_tokens": 500, "tools": TOOLS, "tool_choice": choice})
    rendered = await write(tools, OUTPUT)
    assert ('"name": "weather"' in rendered) is is_offered
    content = (await sending).json()["content"]
    calls = [block["name"] for block in content if block["type"] == "tool_use"]
    assert calls == (["weather", "now"][: 1 if is_single else 2] if is_offered else [])


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "now"}])
async def test_a_call_can_be_demanded(tools: Http, choice: dict[str, Any]) -> None:
    sending = tools.start(PATH, {**BODY, "tools": TOOLS, "tool_choice": choice})
    sent = await tools.submission()
    # A grammar holds the output to a call.
    assert b"now" in sent.params.logits_params
    sending.cancel()


@pytest.mark.parametrize("field", ["output_config.format", "output_format"])
async def test_a_format_of_the_output(http: Http, field: str) -> None:
    def body(form: dict[str, Any]) -> dict[str, Any]:
        if field == "output_format":
            return {**BODY, "output_format": form}
        return {**BODY, "output_config": {"format": form}}

    schema = {"type": "object", "properties": {"name": {"type": "string"}}}
    form = {"type": "json_schema", "schema": schema}
    sending = http.start(PATH, body(form))
    sent = await http.submission()
    assert b"name" in sent.params.logits_params
    sending.cancel()
    status, error = await http.error(PATH, body({**form, "schema": {"type": "thing"}}))
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert error["message"].startswith(f"{field}.schema")
    both = {**body(form), "output_format": form, "output_config": {"format": form}}
    status, error = await http.error(PATH, both)
    assert (status, error["message"][:14]) == (400, "output_format:")


@pytest.mark.parametrize("others", [[], [{"role": "assistant", "content": "The result is"}]])
async def test_tokens_are_counted(tools: Http, others: list[dict[str, Any]]) -> None:
    """Those of the prompt, also of one whose last message the output continues."""
    body = {"messages": [USER, *others], "system": "S", "tools": TOOLS}
    async with client_of(tools) as client:
        count = await client.messages.count_tokens(model="tiny", **body)
    sending = tools.start(PATH, {**BODY, **body})
    sent = await tools.submission()
    assert count.input_tokens == len(sent.prompt_token_ids)
    sending.cancel()


@pytest.mark.parametrize("last", [{"role": "assistant", "content": " "}, _calls(1)])
async def test_the_tokens_of_a_conversation_that_ends_with_the_assistant_are_counted(
    tools: Http, last: dict[str, Any]
) -> None:
    counts = []
    for messages in ([USER], [USER, last], [USER, last, USER]):
        body = {"messages": messages, "tools": TOOLS}
        response = await tools.client.post(f"{PATH}/count_tokens", json=body)
        assert response.status_code == 200, response.text
        counts.append(response.json()["input_tokens"])
    user, with_last, whole = counts
    prompt = await tools.client.post("/tokenize", json={"prompt": "<|assistant|>"})
    # The first and the third one have the beginning of the next message.
    next_one = prompt.json()["count"]
    assert user - next_one < with_last < whole - next_one


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_tokens": None}, "max_tokens: must be an integer"),
        ({"messages": []}, "messages: has 0 entries; at least 1 is needed"),
        ({"colour": 1}, "colour: is not a field of this request; remove it"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0].type: must be 'text', 'tool_use', 'tool_result', 'thinking' or "
            "'redacted_thinking'",
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": [{"type": "text"}]}]},
            "messages[1].content[0].text: is required",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "thinking", "thinking": "a"}]},
                ]
            },
            "messages[0].content[0].type: is thinking, which is not for the role user",
        ),
        (
            {
                "messages": [
                    USER,
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}],
                    },
                ]
            },
            "messages: ends with a message of the assistant that has tool_use without its result; "
            "add a message of the user",
        ),
        ({"messages": [*[USER] * 2, _calls(1, DEEP)]}, "messages[2].content[0].input: is nested"),
        (
            {"messages": [USER, USER, _calls(100), _calls(29)]},
            "messages[3].content: has more than 128 blocks of tool_use",
        ),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type: must be 'custom'"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema: is required"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name: is required with the type tool"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: requires a call, and there are no tools"),
        ({"stop_sequences": [""]}, "stop_sequences[0]: has 0 characters"),
        ({"temperature": -1.0}, "temperature: is -1"),
        ({"system": "x " * 300}, "prompt is too long: messages: has "),
        ({"container": "x"}, "container: is not supported; accepted: null"),
        ({"model": "other"}, "model"),
    ],
)
async def test_errors_name_the_field(http: Http, change: dict[str, Any], message: str) -> None:
    response = await http.client.post(PATH, json={**BODY, **change})
    error = response.json()
    assert (error["type"], sorted(error)) == ("error", ["error", "type"])
    assert error["error"]["message"].startswith(message)
    kind = "not_found_error" if "model" in change else "invalid_request_error"
    assert error["error"]["type"] == kind


# A value in every field that counts.
WHOLE: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "a", "signature": "b"},
                {"type": "redacted_thinking", "data": "a"},
                {"type": "tool_use", "id": "a", "name": "f", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "a",
                    "content": [{"type": "text", "text": "a"}],
                    "is_error": False,
                }
            ],
        },
    ],
    "system": [{"type": "text", "text": "a"}],
    "tools": [{"type": "custom", "name": "f", "description": "a", "input_schema": {}}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": False},
    "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "summarized"},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
    "chat_template_kwargs": {"a": 1},
    "context_management": {
        "edits": [
            {
                "type": "clear_thinking_20251015",
                "keep": {"type": "thinking_turns", "value": 1},
            }
        ]
    },
    "mcp_servers": [],
}
WRONG: list[Any] = [None, True, -1, 1.5, 10**30, "x", "\0", [], [None], {}, {"type": "x"}, {"": []}]


def _replaced(value: Any) -> Iterator[Any]:
    """Wrong values, and the value with each of its parts replaced by each of them."""
    yield from WRONG
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict | list):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in parts:
        for other in _replaced(part):
            changed = value.copy()
            changed[key] = other
            yield changed


async def test_any_wrong_value_is_refused_with_its_field(tools: Http) -> None:
    num_refused = 0
    for field, value in WHOLE.items():
        for wrong in _replaced(value):
            response = await tools.client.post(COUNT, json={**WHOLE, field: wrong})
            assert response.status_code in (200, 400), (field, wrong)
            if response.status_code == 400:
                num_refused += 1
                error = response.json()
                assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
                assert error["error"]["message"].startswith(field), (field, wrong)
    assert num_refused > 300


@pytest.mark.parametrize(
    ("path", "names"),
    [(PATH, {"request-id", "x-request-id"}), ("/v1/chat/completions", {"x-request-id"})],
)
async def test_a_refused_body_has_the_clients_id(http: Http, path: str, names: set[str]) -> None:
    for given, expected in (
        ({"x-request-id": "r"}, "r"),
        ({"x-request-id": "ü"}, None),
        ({}, None),
    ):
        encoded = {name: value.encode("latin-1") for name, value in given.items()}
        response = await http.client.post(path, json={"model": 3}, headers=encoded)
        assert response.status_code == 400
        ids = {name: response.headers.get(name) for name in ("request-id", "x-request-id")}
        assert ids == {name: expected if name in names else None for name in ids}


async def test_the_client_raises_the_error_of_a_stream(http: Http) -> None:
    async with client_of(http) as client:

        async def read() -> None:
            async with client.messages.stream(
                model="tiny",
                max_tokens=3,
                messages=[USER],  # type: ignore[list-item]
            ) as stream:
                async for _ in stream:
                    pass

        reading = asyncio.create_task(read())
        sent = await http.submission()
        http.stack.scheduler.accept(sent)
        http.stack.scheduler.write(sent, 0, http.stack.encode("a"))
        http.stack.scheduler.fail(sent, grpc.StatusCode.INTERNAL)
        with pytest.raises(anthropic.APIStatusError, match="no") as raised:
            await reading
    body: Any = raised.value.body
    assert body["error"]["type"] == "api_error"


async def test_an_error_within_a_resumed_stream_has_the_form_of_a_message(http: Http) -> None:
    scheduler = http.stack.scheduler
    body = {**BODY, "stream": True, "resume_window_s": 30}
    async with http.stream(PATH, body, x_request_id="r") as events:
        sent = await http.submission()
        scheduler.accept(sent)
        await events.next()
    async with http.stream("/v1/requests/r/events") as events:
        attachment = await scheduler.attachments.get()
        scheduler.accept(attachment, sent.opaque)
        await events.next()
        scheduler.fail(attachment, grpc.StatusCode.INTERNAL)
        [error] = await events.rest()
    assert error.name == "error"
    assert error.json() == {"type": "error", "error": {"type": "api_error", "message": "no"}}


async def test_anthropics_client_reads_the_models(http: Http) -> None:
    async with client_of(http) as client:
        (model,) = [model async for model in client.models.list()]
        assert model == await client.models.retrieve(model.id)
    assert (model.id, model.type, model.display_name) == ("tiny", "model", "tiny")
    assert abs(model.created_at.timestamp() - time.time()) < 600


async def test_clients_present_their_key_as_anthropics(http: Http) -> None:
    http.stack.gateway.authentication.replace({hash_key("k"): Tenant("t")})
    async with client_of(http, "k") as client:
        creating = client.messages.create(model="tiny", max_tokens=3, messages=[USER])  # type: ignore[list-item]
        _, message = await asyncio.gather(write(http, "ok"), creating)
    assert message.content[0].text == "ok"
    for other in ("Basic dTpw", ""):
        headers = {"x-api-key": "k", "authorization": other}
        assert (await http.client.post(COUNT, json=COUNTED, headers=headers)).status_code == 200
    headers = {"x-api-key": "k", "authorization": "Bearer other"}
    assert (await http.client.post(COUNT, json=COUNTED, headers=headers)).status_code == 401
    async with client_of(http, "other") as client:
        with pytest.raises(anthropic.AuthenticationError, match="unknown"):
            await client.messages.create(model="tiny", max_tokens=3, messages=[USER])  # type: ignore[list-item]


async def test_the_tool_runner_continues_without_a_thread(tools: Http) -> None:
    """It asks for a conversation that the server keeps, until an error says that there is none."""

    @anthropic.beta_async_tool
    async def weather(city: str) -> str:
        """The weather."""
        return f"warm in {city}"

    async with client_of(tools) as client:
        runner = client.beta.messages.tool_runner(
            model="tiny",
            max_tokens=500,
            messages=[USER],  # type: ignore[list-item]
            tools=[weather],
        )
        output = CALLS[: CALLS.index("</tool_call>") + len("</tool_call>")]
        running = asyncio.create_task(runner.until_done())
        await write(tools, output)
        assert "warm in Bern" in await write(tools, "ok")
        last: Any = await running
    assert last.content[0].text == "ok"


async def test_paths_that_do_not_exist_have_errors_in_the_same_form(http: Http) -> None:
    response = await http.client.get("/v1/messages")
    assert response.status_code == 405
    assert response.json()["error"]["type"] == "invalid_request_error"
    response = await http.client.post("/v1/messages/batches", json=BODY)
    assert response.json()["error"]["type"] == "not_found_error"
    response = await http.client.post("/messages", json=BODY)
    assert "the path is /v1/messages" in json.dumps(response.json())


async def test_what_a_client_states_for_its_bill_is_not_part_of_the_prompt(tools: Http) -> None:
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1.2;"}
    rendered = await prompt(tools, system=[billing, {"type": "text", "text": "S"}])
    assert "<|system|>S" in rendered
    assert "billing" not in rendered
    assert "system" not in await prompt(tools, system=[billing])


def _clearing(keep: Any) -> dict[str, Any]:
    return {"edits": [{"type": "clear_thinking_20251015", "keep": keep}]}


async def test_thinking_of_earlier_replies_is_cleared(tools: Http) -> None:
    def reply(thinking: str) -> dict[str, Any]:
        call = {"type": "tool_use", "id": thinking, "name": "f", "input": {}}
        thought = {"type": "thinking", "thinking": thinking, "signature": "s"}
        return {"role": "assistant", "content": [thought, call]}

    def result(of: str) -> dict[str, Any]:
        return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": of}]}

    messages = [
        *(USER, reply("one"), result("one"), {"role": "assistant", "content": "b"}),
        # Without thinking: it does not count.
        *(USER, {"role": "assistant", "content": "c"}),
        *(USER, reply("two"), result("two"), reply("three"), result("three")),
    ]
    thoughts = {f"<think>{name}</think>" for name in ("one", "two", "three")}
    one = {"<think>one</think>"}
    for edits, kept in (
        ({"edits": []}, thoughts),
        (_clearing("all"), thoughts),
        (_clearing({"type": "thinking_turns", "value": 1}), thoughts - one),
        (_clearing({"type": "thinking_turns", "value": 2}), thoughts),
    ):
        rendered = await prompt(tools, messages=messages, context_management=edits)
        assert {thought for thought in thoughts if thought in rendered} == kept


@pytest.mark.parametrize(
    ("edits", "field"),
    [
        ([{"type": "clear_tool_uses_20250919"}], "edits[0].type"),
        (_clearing("last")["edits"], "edits[0].keep"),
        (_clearing({"type": "thinking_turns", "value": 0})["edits"], "edits[0].keep.value"),
        (_clearing("all")["edits"] * 2, "edits"),
    ],
)
async def test_other_edits_of_the_context_are_refused(
    tools: Http, edits: list[Any], field: str
) -> None:
    status, error = await tools.error(PATH, {**BODY, "context_management": {"edits": edits}})
    assert status == 400
    assert error["message"].startswith(f"context_management.{field}: ")


def _fields(kind: Any) -> set[str]:
    return {name for one in kind.__mro__ for name in getattr(one, "__annotations__", {})}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (message_create_params.MessageCreateParamsStreaming, message.MessageRequest),
        (beta_params.MessageCreateParamsStreaming, message.MessageRequest),
        (types.MessageCountTokensParams, message.CountTokensRequest),
        (types.OutputConfigParam, message.OutputConfig),
        (types.ToolParam, message.MessageTool),
        (types.TextBlockParam, message_input.TextBlock),
        (types.ToolUseBlockParam, message_input.ToolUseBlock),
        (types.ToolResultBlockParam, message_input.ToolResultBlock),
        (types.ThinkingBlockParam, message_input.ThinkingBlock),
        (types.RedactedThinkingBlockParam, message_input.RedactedThinkingBlock),
    ],
)
def test_every_field_of_the_client_is_known(theirs: Any, ours: type[HttpRequest]) -> None:
    known = {field.alias or name for name, field in ours.model_fields.items()}
    # `betas` are a header.
    assert _fields(theirs) - known <= {"betas"}
