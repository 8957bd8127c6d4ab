"""Conversations with tools: what is sent, and what is returned."""

import json

import pytest
from google.protobuf import json_format

from quire import Client, ToolCall, ToolCallDelta
from quire.client.conversations import ConversationOptions
from quire.client.outputs import CompletionDelta, CompletionOutput, Usage
from quire.client.requests import RequestOptions, fill_request
from quire.llm import LLM
from quire.v1 import conversation_pb2, inference_pb2

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
NAMED = {"type": "function", "function": {"name": "weather"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
USER = {"role": "user", "content": "Is it warm?"}


def sent(messages, **options) -> conversation_pb2.Conversation:
    request = inference_pb2.GenerateRequest()
    return fill_request(request, messages, None, options).conversation


def test_every_field_of_a_conversation_has_an_option_of_its_name():
    fields = set(conversation_pb2.Conversation.DESCRIPTOR.fields_by_name)
    assert set(ConversationOptions.__annotations__) == fields - {"messages"}
    assert set(RequestOptions.__annotations__) > fields - {"messages"}


def test_options_are_sent():
    variables = {"enable_thinking": False}
    message = sent(
        [USER],
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        include_reasoning=False,
        add_generation_prompt=False,
        continue_final_message=False,
        chat_template_kwargs=variables,
        documents=[{"title": "A", "text": "alpha"}, {"text": "beta"}],
    )
    [tool] = message.tools
    assert (tool.name, json.loads(tool.parameters)) == ("weather", PARAMETERS)
    assert not tool.HasField("description")
    assert message.tool_choice.mode == conversation_pb2.TOOL_CHOICE_MODE_REQUIRED
    assert json_format.MessageToDict(message.chat_template_kwargs) == variables
    assert [
        [(one.name, one.text) for one in document.fields] for document in message.documents
    ] == [
        [("title", "A"), ("text", "alpha")],
        [("text", "beta")],
    ]
    flags = ("parallel_tool_calls", "include_reasoning", "add_generation_prompt")
    for name in (*flags, "continue_final_message"):
        assert message.HasField(name)
        assert not getattr(message, name)
    assert sent([USER], tool_choice=NAMED).tool_choice.name == "weather"


def test_absent_options_are_not_sent():
    options = dict.fromkeys(ConversationOptions.__annotations__)
    assert sent([USER], **options) == sent([USER])
    assert [field.name for field, _ in sent([USER]).ListFields()] == ["messages"]


@pytest.mark.parametrize("call", [CALL, ToolCall("c1", "weather", "{}")], ids=["dict", "ToolCall"])
def test_messages_of_a_loop_of_tools(call):
    assistant = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "hm"}
    result = {"role": "tool", "content": "20", "tool_call_id": "c1", "name": "weather"}
    _, second, third = sent([USER, assistant, result]).messages
    assert second == conversation_pb2.Message(
        role="assistant",
        reasoning="hm",
        tool_calls=[conversation_pb2.ToolCall(id="c1", name="weather", arguments="{}")],
    )
    assert third == conversation_pb2.Message(
        role="tool", content="20", tool_call_id="c1", name="weather"
    )


@pytest.mark.parametrize(
    ("prompt", "options", "error", "message"),
    [
        ("a", {"tools": [TOOL]}, ValueError, "tools: is an option of conversations"),
        ([1], {"tool_choice": "auto"}, ValueError, "tool_choice: is an option of conversations"),
        ([USER], {"tools": TOOL}, TypeError, "tools: must be a list of tools"),
        ([USER], {"tools": [{"name": "f"}]}, TypeError, r"tools\[0\]: must be {'type'"),
        (
            [USER],
            {"tools": [{"function": {"name": "f", "x": 1}}]},
            ValueError,
            r"tools\[0\]: a function has no 'x'",
        ),
        (
            [USER],
            {"tools": [{"function": {"name": "f", "parameters": {"a": {1}}}}]},
            TypeError,
            r"tools\[0\]: parameters: not representable as JSON",
        ),
        ([USER], {"tool_choice": "some"}, TypeError, "tool_choice: must be 'auto'"),
        ([USER], {"parallel_tool_calls": 1}, TypeError, "parallel_tool_calls: must be True"),
        ([USER], {"chat_template_kwargs": [1]}, TypeError, "chat_template_kwargs: must be"),
        ([USER], {"documents": {"text": "a"}}, TypeError, "documents: must be a list"),
        ([USER], {"documents": ["a"]}, TypeError, r"documents\[0\]: must be a document"),
        ([USER], {"documents": [{"text": 5}]}, TypeError, r"documents\[0\]: text: must be"),
        ([USER], {"chat_template_kwargs": {"a": 10**400}}, ValueError, "kwargs: has a number of"),
        ([{"role": "user"}], {}, ValueError, "messages: expected"),
        ([{"role": "user", "content": 5}], {}, ValueError, "messages: expected"),
        ([{**USER, "other": 1}], {}, ValueError, "messages: expected"),
        ([{**USER, "tool_calls": [5]}], {}, TypeError, "tool_calls: must be a list of calls"),
        (
            [{**USER, "tool_calls": [{"id": "a", "function": {"name": "f"}}]}],
            {},
            TypeError,
            "tool_calls: arguments: must be a text",
        ),
    ],
    ids=str,
)
def test_what_no_message_can_contain_is_named(prompt, options, error, message):
    with pytest.raises(error, match=message):
        sent(prompt, **options)


def test_reasoning_and_calls_are_returned():
    choice = inference_pb2.Choice(
        reasoning="hm",
        tool_calls=[conversation_pb2.ToolCall(id="c1", name="weather", arguments="{}")],
        finish_reason=inference_pb2.FINISH_REASON_TOOL_CALLS,
    )
    output = CompletionOutput.from_proto(choice)
    assert (output.reasoning, output.finish_reason) == ("hm", "tool_calls")
    assert output.tool_calls == [ToolCall("c1", "weather", "{}")]
    delta = CompletionDelta.from_proto(
        inference_pb2.ChoiceDelta(
            reasoning="h",
            tool_calls=[
                inference_pb2.ToolCallDelta(index=0, id="c1", name="weather"),
                inference_pb2.ToolCallDelta(index=0, arguments="{}"),
            ],
            finish_reason=inference_pb2.FINISH_REASON_TOOL_CALLS,
        )
    )
    assert (delta.reasoning, delta.finish_reason) == ("h", "tool_calls")
    assert delta.tool_calls == [
        ToolCallDelta(0, "c1", "weather", ""),
        ToolCallDelta(0, None, None, "{}"),
    ]
    usage = inference_pb2.Usage(completion_tokens=5, reasoning_tokens=3)
    assert Usage.from_proto(usage).reasoning_tokens == 3


def test_every_reason_of_an_end_has_a_name():
    for reason in inference_pb2.FinishReason.values()[1:]:
        assert CompletionOutput.from_proto(inference_pb2.Choice(finish_reason=reason)).finish_reason


def test_llm_takes_the_options_as_arguments(server):
    with LLM(target=server.target) as llm:
        llm.chat([USER], tools=[TOOL], max_tokens=5)
        list(llm.stream_chat([USER], tool_choice="none"))
        with pytest.raises(TypeError, match="toolz: no such argument"):
            llm.chat([USER], toolz=[TOOL])
    first, second = server.inference.requests
    assert first.conversation.tools[0].name == "weather"
    assert first.sampling_params.max_tokens == 5
    assert second.conversation.tool_choice.mode == conversation_pb2.TOOL_CHOICE_MODE_NONE


def test_clients_take_the_options(server):
    with Client(server.target) as client:
        client.generate([USER], tools=[TOOL])
    [request] = server.inference.requests
    assert request.conversation.tools[0].name == "weather"
