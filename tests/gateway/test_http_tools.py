"""Tools and reasoning in chat completions, with the official client."""

import asyncio
import json
from typing import Any

import openai
import pytest
import tools_model
from http_client import Http
from openai.types.chat import ChatCompletionMessageFunctionToolCall
from tools_model import ARGUMENTS, OUTPUT, TOOLS

from quire.internal.v1 import scheduler_pb2

PATH = "/v1/chat/completions"
USER: dict[str, Any] = {"role": "user", "content": "a"}
STOP = scheduler_pb2.END_REASON_STOP_TOKEN


@pytest.fixture
def tools(http: Http, monkeypatch: pytest.MonkeyPatch) -> Http:
    tools_model.use(http.stack, monkeypatch)
    return http


async def write(http: Http, text: str) -> str:
    """Write the output of the next request; return its prompt."""
    scheduler, model = http.stack.scheduler, http.stack.gateway.served.get(None)
    ids = [*http.stack.encode(text), model.files.eos_token_ids[0]]
    sent = await http.submission()
    scheduler.accept(sent)
    for at, id_ in enumerate(ids):
        scheduler.write(sent, at, [id_])
    scheduler.end(sent, len(ids), STOP, stop_token_id=ids[-1])
    return model.vocabulary.decode(list(sent.prompt_token_ids))


def client_of(http: Http) -> openai.AsyncOpenAI:
    assert http.stack.gateway.http is not None
    url = f"http://{http.stack.gateway.http.address}/v1"
    return openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)


async def test_the_official_client_gets_calls(tools: Http) -> None:
    async with client_of(tools) as client:
        creating = asyncio.create_task(
            client.chat.completions.create(model="tiny", messages=[USER], tools=TOOLS)  # type: ignore[call-overload]
        )
        await write(tools, OUTPUT)
        completion = await creating
    [choice] = completion.choices
    assert (choice.finish_reason, choice.logprobs) == ("tool_calls", None)
    assert (choice.message.content, choice.message.reasoning) == ("So: ", "Why?")
    assert choice.message.reasoning_content == "Why?"
    first, second = choice.message.tool_calls
    assert (first.function.name, first.function.arguments) == ("weather", ARGUMENTS)
    assert (second.function.name, second.function.arguments) == ("now", "{}")
    assert completion.usage.completion_tokens_details.reasoning_tokens > 0

    # The client sends everything back, and litellm fields that it does not know once more.
    copies = {"provider_specific_fields": {"refusal": None, "reasoning": "Why?"}}
    again = [
        USER,
        {**choice.message.model_dump(), **copies},
        {"role": "tool", "tool_call_id": first.id, "content": "warm"},
    ]
    sending = tools.start(PATH, {"messages": again, "tools": TOOLS})
    prompt = await write(tools, "ok")
    assert "<think>Why?</think>So: " in prompt
    assert f"<|tool|>warm={first.id}" in prompt
    assert (await sending).json()["choices"][0]["finish_reason"] == "stop"


async def test_the_official_client_assembles_streamed_calls(tools: Http) -> None:
    async with client_of(tools) as client:

        async def read() -> Any:
            async with client.chat.completions.stream(
                model="tiny",
                messages=[USER],
                tools=TOOLS,  # type: ignore[arg-type]
            ) as stream:
                names = [event.name async for event in stream if "arguments.done" in event.type]
                return names, await stream.get_final_completion()

        reading = asyncio.create_task(read())
        await write(tools, OUTPUT)
        names, completion = await reading
        assert names == ["weather", "now"]
        [choice] = completion.choices
        # Its messages have fields for what it has parsed, also where it sends them back.
        message: Any = choice.message
        results: list[Any] = [
            {"role": "tool", "tool_call_id": call.id, "content": "warm"}
            for call in choice.message.tool_calls or ()
        ]
        again, prompt = await asyncio.gather(
            client.chat.completions.create(model="tiny", messages=[USER, message, *results]),
            write(tools, "ok"),
        )
        assert again.choices[0].message.content == "ok"
        assert f'"arguments": {ARGUMENTS}' in prompt
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "So: "
    for call in choice.message.tool_calls:
        assert isinstance(call, ChatCompletionMessageFunctionToolCall)
    assert [json.loads(call.function.arguments) for call in choice.message.tool_calls] == [
        {"city": "Bern"},
        {},
    ]


async def test_deltas_of_reasoning_precede_those_of_content(tools: Http) -> None:
    async with tools.stream(PATH, {"messages": [USER], "stream": True}) as events:
        await write(tools, "<think>Why?</think>So.")
        *received, _ = await events.rest()
    deltas = [c["delta"] for event in received for c in event.json()["choices"]]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "Why?"
    assert "".join(delta.get("content", "") for delta in deltas) == "So."
    kinds = [kind for delta in deltas for kind in ("reasoning", "content") if delta.get(kind)]
    assert kinds == sorted(kinds, reverse=True)


async def test_effort_of_reasoning_reaches_the_template(tools: Http) -> None:
    for change, end in [
        ({"reasoning_effort": "none"}, "<think></think>"),
        ({"reasoning_effort": "xhigh"}, "<|assistant|>xhigh"),
        ({"reasoning_effort": "max"}, "<|assistant|>max"),
        ({"reasoning_effort": None}, "<|assistant|>"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "<think></think>"),
    ]:
        sending = tools.start(PATH, {"messages": [USER], **change})
        prompt = await write(tools, "So.")
        assert prompt.endswith(end)
        assert (await sending).json()["choices"][0]["message"]["content"] == "So."


async def test_hints_change_no_token(tools: Http) -> None:
    """Of caching, as litellm, Cline and opencode send them, and OpenAI's own."""
    hint = {"cache_control": {"type": "ephemeral"}}
    breakpoint_ = {"prompt_cache_breakpoint": {"mode": "explicit"}}
    options = {
        "prompt_cache_options": {"mode": "implicit"},
        "prompt_cache_retention": "24h",
        "service_tier": "flex",
    }
    chat: dict[str, Any] = {"store": True, "prediction": {"type": "content", "content": "b"}}
    chat |= {"verbosity": "low"}
    # vLLM's, with the values that change nothing there either.
    chat |= {"mm_processor_kwargs": {}, "logits_processors": [], "thinking_token_budget": None}
    chat |= {"truncation_side": "left", "vllm_xargs": {}, "kv_transfer_params": None}
    response = {
        "max_tool_calls": 3,
        "text": {"verbosity": "high"},
        "reasoning": {"summary": "detailed"},
    }
    prompts = []
    for message, part, fields in (({}, {}, {}), (hint, {**hint, **breakpoint_}, options)):
        chat_fields, response_fields = (chat, response) if fields else ({}, {})
        messages = [
            {"role": "system", "content": [{"type": "text", "text": "Be brief.", **part}]},
            {**USER, **message},
            {"role": "assistant", "tool_calls": [{**call("weather", "{}"), **message}]},
            {
                "role": "tool",
                "tool_call_id": "c",
                "content": [{"type": "text", "text": "b", **part}],
            },
        ]
        functions = [
            {**tool, "function": {**tool["function"], **message}, **message} for tool in TOOLS
        ]
        sending = tools.start(
            PATH, {"messages": messages, "tools": functions, **fields, **chat_fields}
        )
        prompts.append(await write(tools, "ok"))
        assert (await sending).status_code == 200
        text = {"type": "input_text", "text": "a", **part}
        body = {"input": [{"role": "user", "content": [text]}], "tools": RESPONSE_TOOLS, **fields}
        sending = tools.start("/v1/responses", {**body, **response_fields})
        prompts.append(await write(tools, "ok"))
        assert (await sending).status_code == 200
    assert prompts[2:] == prompts[:2]


async def test_the_prompt_of_tools_is_tokenized(tools: Http) -> None:
    body = {"messages": [USER], "tools": TOOLS}
    response = await tools.client.post("/tokenize", json=body)
    decode = tools.stack.gateway.served.get(None).vocabulary.decode
    assert '<|tool|>{"type": "function"' in decode(response.json()["tokens"])


def call(name: str, arguments: str, call_id: str = "c") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "invalid_field"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools[0].function.name",
            "tool_name",
        ),
        ({"tool_choice": "any"}, "tool_choice", "invalid_field"),
        ({"tool_choice": "required"}, "tool_choice", "no_tools"),
        # huggingface_hub leaves the type out.
        (
            {"tool_choice": {"function": {"name": "x"}}, "tools": TOOLS},
            "tool_choice.function.name",
            "unknown_tool",
        ),
        (
            {"tool_choice": {"type": "function", "function": {"name": "x"}}, "tools": TOOLS},
            "tool_choice.function.name",
            "unknown_tool",
        ),
        (
            {"messages": [USER, {"role": "assistant", "tool_calls": [call("f", "[1]")]}]},
            "messages[1].tool_calls[0].function.arguments",
            "no_object",
        ),
        (
            {"messages": [USER, {"role": "assistant", "tool_calls": [call("a b", "{}")]}]},
            "messages[1].tool_calls[0].function.name",
            "tool_name",
        ),
        (
            {"messages": [USER, {"role": "assistant", "tool_calls": [call("f", "{}", "i" * 999)]}]},
            "messages[1].tool_calls[0].id",
            "id_length",
        ),
        ({"function_call": {"name": "x"}}, "function_call", "unsupported_field"),
        ({"reasoning_effort": "maximum"}, "reasoning_effort", "invalid_field"),
        ({"tools": TOOLS, "detokenize": False}, "detokenize", "tools_without_text"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]},
            "messages[0].tool_calls[0].function",
            "missing_field",
        ),
    ],
    ids=lambda value: "" if isinstance(value, dict) else str(value),
)
async def test_an_invalid_field_of_tools_is_named(
    tools: Http, change: dict[str, Any], param: str, code: str
) -> None:
    status, error = await tools.error(PATH, {"messages": [USER], **change})
    assert (status, error["param"], error["code"]) == (400, param, code)


RESPONSE_TOOLS = [{"type": "function", **tool["function"]} for tool in TOOLS]


THOUGHT = {"type": "thinking", "thinking": "Why?", "signature": "s"}
TEXT = {"type": "text", "text": "b"}
REDACTED = {"type": "redacted_thinking", "data": "x"}


@pytest.mark.parametrize(
    ("fields", "reasoning"),
    [
        ({"content": [THOUGHT, REDACTED, {**THOUGHT, "thinking": "So."}, TEXT]}, "Why?\nSo."),
        ({"content": [THOUGHT, TEXT], "reasoning_content": "Because."}, "Because."),
        ({"content": [REDACTED, TEXT]}, None),
        ({"content": "b", "thinking_blocks": [THOUGHT, REDACTED]}, "Why?"),
        ({"content": [THOUGHT, TEXT], "thinking_blocks": [THOUGHT]}, "Why?"),
    ],
)
async def test_parts_of_thinking_are_the_reasoning_of_a_message(
    tools: Http, fields: dict[str, Any], reasoning: str | None
) -> None:
    messages = [USER, {"role": "assistant", **fields}, USER]
    sending = tools.start(PATH, {"messages": messages})
    prompt = await write(tools, "c")
    assert (await sending).status_code == 200
    thought = "" if reasoning is None else f"<think>{reasoning}</think>"
    assert f"<|assistant|>{thought}b<|user|>" in prompt


async def test_parts_of_thinking_are_the_assistants(tools: Http) -> None:
    messages = [USER, {"role": "user", "content": [TEXT, THOUGHT]}]
    status, error = await tools.error(PATH, {"messages": messages})
    assert (status, error["param"]) == (400, "messages[1].content")
    assert "thinking, which is for the role assistant alone" in error["message"]


async def test_a_response_has_items(tools: Http) -> None:
    async with client_of(tools) as client:
        creating = asyncio.create_task(
            client.responses.create(input="a", tools=RESPONSE_TOOLS)  # type: ignore[call-overload]
        )
        await write(tools, OUTPUT)
        response = await creating
    reasoning, message, first, second = response.output
    assert reasoning.content[0].text == "Why?"
    assert message.content[0].text == "So: "
    assert (first.name, first.arguments) == ("weather", ARGUMENTS)
    assert (second.name, second.arguments) == ("now", "{}")
    assert response.usage.output_tokens_details.reasoning_tokens > 0
    assert [tool.name for tool in response.tools] == ["weather", "now"]
    # The client sends everything back.
    again = [
        {"role": "user", "content": "a"},
        *(item.model_dump(exclude_none=True) for item in response.output),
        {"type": "function_call_output", "call_id": first.call_id, "output": "warm"},
    ]
    # Clients that do so ask for reasoning that only the server can read.
    include = ["reasoning.encrypted_content"]
    body = {"input": again, "tools": RESPONSE_TOOLS, "include": include, "store": False}
    sending = tools.start("/v1/responses", body)
    prompt = await write(tools, "ok")
    assert "<think>Why?</think>So: " in prompt
    assert f'<tool_call>{{"name": "weather", "arguments": {ARGUMENTS}}}' in prompt
    assert f"<|tool|>warm={first.call_id}" in prompt
    [part] = (await sending).json()["output"][0]["content"]
    assert (part["text"], part["logprobs"]) == ("ok", [])


async def test_a_summary_stands_for_reasoning_without_content(tools: Http) -> None:
    summary = [{"type": "summary_text", "text": "Why?"}]
    content = [{"type": "reasoning_text", "text": "Because."}]
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({}, "Why?"),
        ({"content": []}, "Why?"),
        ({"content": content}, "Because."),
    )
    for fields, text in cases:
        reasoning = {"type": "reasoning", "id": "rs_1", "summary": summary, **fields}
        output = [reasoning, {"role": "assistant", "content": "So."}]
        sending = tools.start("/v1/responses", {"input": [USER, *output, USER]})
        prompt = await write(tools, "ok")
        assert f"<think>{text}</think>So." in prompt
        assert (await sending).status_code == 200


async def test_adjacent_items_of_reasoning_are_joined(tools: Http) -> None:
    parts = [[{"type": "reasoning_text", "text": text}] for text in ("Why?", "Because.")]
    # Of a server that encrypts its reasoning.
    contents = [parts[0], [], parts[1]]
    output = [{"type": "reasoning", "content": content} for content in contents]
    message = {"role": "assistant", "content": "So."}
    sending = tools.start("/v1/responses", {"input": [USER, *output, message, USER]})
    prompt = await write(tools, "ok")
    assert "<think>Why?\nBecause.</think>So." in prompt
    assert (await sending).status_code == 200


async def test_a_guided_call_that_is_cut_has_the_arguments_so_far(tools: Http) -> None:
    chat = {"messages": [USER], "tools": TOOLS}
    response = {"input": "a", "tools": RESPONSE_TOOLS}
    for path, body in ((PATH, chat), ("/v1/responses", response)):
        cut = '<tool_call>\n{"name": "weather", "arguments": {"city": "B'
        received = await tools.respond(path, {**body, "tool_choice": "required"}, cut)
        if path == PATH:
            [choice] = received["choices"]
            [call] = choice["message"]["tool_calls"]
            assert (choice["finish_reason"], choice["message"]["content"]) == ("length", None)
            assert call["function"] == {"name": "weather", "arguments": '{"city": "B'}
        else:
            [item] = received["output"]
            assert (item["status"], item["arguments"]) == ("incomplete", '{"city": "B')


async def test_a_forced_call_that_is_cut_before_its_name_is_no_content(tools: Http) -> None:
    chat = {"messages": [USER], "tools": TOOLS, "tool_choice": "required"}
    response = {"input": "a", "tools": RESPONSE_TOOLS, "tool_choice": "required"}
    for cut in ("<tool_", '<tool_call>\n{"name": "wea'):
        [choice] = (await tools.respond(PATH, chat, cut))["choices"]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "")
        assert "tool_calls" not in choice["message"]
        async with tools.stream(PATH, {**chat, "stream": True}) as events:
            await tools.stack.scheduler.serve_one(tools.stack.encode(cut))
            *received, _ = await events.rest()
        deltas = [one["delta"] for event in received for one in event.json()["choices"]]
        assert not any(delta.get("content") for delta in deltas)
        received = await tools.respond("/v1/responses", response, cut)
        [item] = received["output"]
        assert (received["status"], item["status"]) == ("incomplete", "incomplete")
        assert item["content"][0]["text"] == ""


async def test_the_official_client_assembles_a_streamed_response(tools: Http) -> None:
    async with client_of(tools) as client:

        async def read() -> Any:
            async with client.responses.stream(
                model="tiny",
                input="a",
                tools=RESPONSE_TOOLS,  # type: ignore[arg-type]
            ) as stream:
                events = [event async for event in stream]
                return events, await stream.get_final_response()

        reading = asyncio.create_task(read())
        await write(tools, OUTPUT)
        events, response = await reading
    kinds = ["reasoning", "message", "function_call", "function_call"]
    assert [item.type for item in response.output] == kinds
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.type for item in done] == kinds
    assert [item.arguments for item in done[2:]] == [ARGUMENTS, "{}"]
    numbers = [event.sequence_number for event in events]
    assert numbers == sorted(set(numbers))


def _text_of(events: list[Any], kind: str) -> str:
    name = f"response.{kind}.delta"
    return "".join(event.json()["delta"] for event in events if event.name == name)


async def test_a_response_is_resumed_after_each_event(tools: Http) -> None:
    body = {"input": "a", "tools": RESPONSE_TOOLS, "stream": True}
    scheduler = tools.stack.scheduler
    eos = tools.stack.gateway.served.get(None).files.eos_token_ids[0]
    ids = [*tools.stack.encode(OUTPUT), eos]
    async with tools.stream("/v1/responses", body, x_request_id="r") as events:
        sent = await tools.submission()
        scheduler.accept(sent)
        for at, id_ in enumerate(ids):
            scheduler.write(sent, at, [id_])
        scheduler.end(sent, len(ids), STOP, stop_token_id=eos)
        *whole, _ = await events.rest()
    for at in range(0, len(whole), 5):
        number = whole[at].json()["sequence_number"]
        url = f"/v1/responses/resp_r?stream=true&starting_after={number}"
        async with tools.stream(url) as events:
            attachment = await scheduler.attachments.get()
            scheduler.accept(attachment, sent.opaque)
            # In other parts.
            for first in range(0, len(ids), 9):
                scheduler.write(attachment, first, ids[first : first + 9])
            scheduler.end(attachment, len(ids), STOP, stop_token_id=eos)
            *rest, _ = await events.rest()
        both = [*whole[: at + 1], *rest]
        for kind in ("reasoning_text", "output_text", "function_call_arguments"):
            assert _text_of(both, kind) == _text_of(whole, kind)
        assert rest[-1].json()["response"]["output"] == whole[-1].json()["response"]["output"]
        done = "response.output_item.done"
        assert sum(one.name == done for one in both) == sum(one.name == done for one in whole)


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "invalid_field"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "tool_name"),
        ({"tool_choice": "required"}, "tool_choice", "no_tools"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary", "invalid_field"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity", "invalid_field"),
        ({"include": ["file_search_call.results"]}, "include[0]", "invalid_field"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else str(value),
)
async def test_an_invalid_field_of_a_response_is_named(
    tools: Http, change: dict[str, Any], param: str, code: str
) -> None:
    status, error = await tools.error("/v1/responses", {"input": "a", **change})
    assert (status, error["param"], error["code"]) == (400, param, code)
