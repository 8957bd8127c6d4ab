"""Tools and reasoning over gRPC, and in choices that are resumed."""

from collections.abc import Sequence
from typing import Any

import gateway_tokenizers
import grpc
import pytest
import tools_model
from gateway_fake_scheduler import StreamRequest
from gateway_stack import Stack, field_of, info_of
from output_texts import RECORDED, Recorded
from tokenizers import AddedToken, Tokenizer

from gateway_svc.generation.choice import ChoiceUpdate, create_choices
from gateway_svc.output_formats.formats import ModelFormats
from gateway_svc.output_formats.pieces import Content, Piece, Reasoning, joined
from gateway_svc.scheduler.events import Ended, NewTokens
from gateway_svc.scheduler.shards import Shards
from gateway_svc.text.model_files import ModelFiles
from gateway_svc.text.served_model import Model
from quire.internal.v1 import gateway_pb2, logits_pb2, scheduler_pb2
from quire.v1 import inference_pb2 as pb
from quire.v1.conversation_pb2 import Conversation, Message, Tool, ToolCall, ToolChoice
from quire.v1.structured_output_pb2 import JsonObject, StructuredOutput, Texts

STOP = scheduler_pb2.END_REASON_STOP_TOKEN
TOOLS = [
    Tool(name="weather", parameters='{"type": "object"}'),
    Tool(name="now"),
]
SURROGATE = ToolCall(name="a", arguments=r'{"a": "\udc00"}')
NO_OBJECT = ToolCall(name="a", arguments="1")


@pytest.fixture
def tools(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> Stack:
    tools_model.use(stack, monkeypatch)
    return stack


def conversation(**fields: Any) -> Conversation:
    default = {"messages": [Message(role="user", content="a")], "tools": TOOLS}
    return Conversation(**{**default, **fields})


def write(stack: Stack, wanted: StreamRequest, ids: Sequence[int], opaque: bytes = b"") -> None:
    eos = stack.gateway.served.get(None).files.eos_token_ids[0]
    stack.scheduler.accept(wanted, opaque)
    for at, id_ in enumerate(ids):
        stack.scheduler.write(wanted, at, [id_])
    stack.scheduler.write(wanted, len(ids), [eos])
    stack.scheduler.end(wanted, len(ids) + 1, STOP, stop_token_id=eos)


async def generated(stack: Stack, text: str, conversation: Conversation) -> pb.GenerateResponse:
    call = stack.inference.Generate(pb.GenerateRequest(request_id="r", conversation=conversation))
    write(stack, await stack.scheduler.submissions.get(), stack.encode(text))
    return await call


async def test_reasoning_and_calls_are_separate(tools: Stack) -> None:
    response = await generated(tools, tools_model.OUTPUT, conversation())
    [choice] = response.choices
    assert (choice.reasoning, choice.text) == ("Why?", "So: ")
    assert [(call.name, call.arguments) for call in choice.tool_calls] == [
        ("weather", tools_model.ARGUMENTS),
        ("now", "{}"),
    ]
    assert len({call.id for call in choice.tool_calls}) == 2
    assert choice.finish_reason == pb.FINISH_REASON_TOOL_CALLS
    reasoning = tools_model.OUTPUT.partition("</think>")[0] + "</think>"
    assert response.usage.reasoning_tokens == len(tools.encode(reasoning))
    again = await generated(tools, tools_model.OUTPUT, conversation())
    assert again.choices[0].tool_calls == choice.tool_calls


async def test_deltas_add_up(tools: Stack) -> None:
    request = pb.StreamGenerateRequest(conversation=conversation())
    call = tools.inference.StreamGenerate(request)
    write(tools, await tools.scheduler.submissions.get(), tools.encode(tools_model.OUTPUT))
    deltas = [delta async for response in call for delta in response.deltas]
    assert "".join(delta.reasoning for delta in deltas) == "Why?"
    assert "".join(delta.text for delta in deltas) == "So: "
    calls = [one for delta in deltas for one in delta.tool_calls]
    assert [one.index for one in calls if one.HasField("id")] == [0, 1]
    assert [one.name for one in calls if one.HasField("name")] == ["weather", "now"]
    assert "".join(one.arguments for one in calls if one.index == 0) == tools_model.ARGUMENTS
    assert deltas[-1].finish_reason == pb.FINISH_REASON_TOOL_CALLS


async def test_the_reasoning_can_be_left_out(tools: Stack) -> None:
    response = await generated(tools, tools_model.OUTPUT, conversation(include_reasoning=False))
    assert (response.choices[0].reasoning, response.choices[0].text) == ("", "So: ")
    assert response.usage.reasoning_tokens


async def test_the_output_ends_with_the_only_call(tools: Stack) -> None:
    first = tools_model.CALLS.partition("\n</tool_call>")[0]
    response = await generated(tools, tools_model.CALLS, conversation(parallel_tool_calls=False))
    [choice] = response.choices
    assert [call.name for call in choice.tool_calls] == ["weather"]
    assert (choice.text, choice.finish_reason) == ("", pb.FINISH_REASON_TOOL_CALLS)
    assert choice.WhichOneof("stopped_by") is None
    assert len(tools.encode(first)) <= len(choice.token_ids) < len(tools.encode(tools_model.CALLS))
    assert response.usage.completion_tokens == len(choice.token_ids)


async def test_the_worker_generates_nothing_after_the_only_call(tools: Stack) -> None:
    conversation_ = conversation(parallel_tool_calls=False)
    call = tools.inference.Generate(pb.GenerateRequest(conversation=conversation_))
    wanted = await tools.scheduler.submissions.get()
    assert not wanted.deferred_delivery
    tools.scheduler.accept(wanted)
    for at, id_ in enumerate(tools.encode(tools_model.CALLS)):
        tools.scheduler.write(wanted, at, [id_])
    finish = await tools.scheduler.finishes.get()
    tools.scheduler.end(wanted, finish.num_tokens, scheduler_pb2.END_REASON_STOP_STRING)
    [choice] = (await call).choices
    assert len(choice.token_ids) == finish.num_tokens
    assert [one.arguments for one in choice.tool_calls] == [tools_model.ARGUMENTS]
    assert choice.finish_reason == pb.FINISH_REASON_TOOL_CALLS


async def test_min_tokens_delays_the_end_with_the_only_call(tools: Stack) -> None:
    ids = tools.encode(tools_model.CALLS)
    call = tools.inference.Generate(
        pb.GenerateRequest(
            conversation=conversation(parallel_tool_calls=False),
            sampling_params=pb.SamplingParams(min_tokens=len(ids) - 1),
        )
    )
    write(tools, await tools.scheduler.submissions.get(), ids)
    [choice] = (await call).choices
    assert list(choice.token_ids) == ids[:-1]
    assert [one.name for one in choice.tool_calls] == ["weather"]


async def test_without_tools_their_format_is_text(tools: Stack) -> None:
    wanted = conversation(tool_choice=ToolChoice(mode="TOOL_CHOICE_MODE_NONE"))
    for one in (wanted, conversation(tools=[])):
        response = await generated(tools, tools_model.CALLS, one)
        assert response.choices[0].text == tools_model.CALLS
        assert response.choices[0].finish_reason == pb.FINISH_REASON_STOP


async def test_a_prompt_that_is_no_conversation_is_not_parsed(tools: Stack) -> None:
    call = tools.inference.Generate(pb.GenerateRequest(text="a"))
    write(tools, await tools.scheduler.submissions.get(), tools.encode(tools_model.OUTPUT))
    assert (await call).choices[0].text == tools_model.OUTPUT


async def test_messages_are_rendered_with_their_calls(tools: Stack) -> None:
    messages = [
        Message(role="user", content="a"),
        Message(
            role="assistant",
            reasoning="Why?",
            tool_calls=[ToolCall(id="c1", name="weather", arguments=tools_model.ARGUMENTS)],
        ),
        Message(role="tool", content="warm", tool_call_id="c1", name="weather"),
    ]
    call = tools.inference.Generate(
        pb.GenerateRequest(conversation=conversation(messages=messages))
    )
    sent = await tools.scheduler.submissions.get()
    prompt = tools.gateway.served.get(None).vocabulary.decode(list(sent.prompt_token_ids))
    assert '<|tool|>{"type": "function", "function": {"name": "weather",' in prompt
    assert "<think>Why?</think>" in prompt
    assert f'<tool_call>{{"name": "weather", "arguments": {tools_model.ARGUMENTS}}}' in prompt
    assert "<|tool|>warm=c1" in prompt
    call.cancel()


@pytest.mark.parametrize(
    ("change", "field", "reason"),
    [
        ({"tools": [Tool(name="a b")]}, "tools[0].name", "TOOL_NAME"),
        ({"tools": [Tool(name="n" * 129)]}, "tools[0].name", "TOOL_NAME"),
        ({"tools": [Tool(name="a"), Tool(name="a")]}, "tools[1].name", "DUPLICATE_TOOL"),
        ({"tools": [Tool(name="a", parameters="[1]")]}, "tools[0].parameters", "NO_OBJECT"),
        ({"tools": [Tool(name="a", parameters="{")]}, "tools[0].parameters", "NOT_JSON"),
        (
            {"tools": [Tool(name="a", parameters=r'{"a": "\ud800"}')]},
            "tools[0].parameters",
            "NOT_JSON",
        ),
        (
            {"messages": [Message(role="assistant", tool_calls=[SURROGATE])]},
            "messages[0].tool_calls[0].arguments",
            "NOT_JSON",
        ),
        (
            {"tools": [Tool(name="a", parameters='{"a": "%s"}' % ("x" * 2**17))]},
            "tools[0].parameters",
            "TOOLS_SIZE",
        ),
        ({"tools": [Tool(name=f"t{i}") for i in range(129)]}, "tools", "TOO_MANY_TOOLS"),
        ({"tool_choice": ToolChoice(name="x")}, "tool_choice.name", "UNKNOWN_TOOL"),
        ({"tool_choice": ToolChoice(mode=9)}, "tool_choice", "TOOL_CHOICE_MODE"),
        (
            {"tools": [], "tool_choice": ToolChoice(mode="TOOL_CHOICE_MODE_REQUIRED")},
            "tool_choice",
            "NO_TOOLS",
        ),
        (
            {"messages": [Message(role="user", tool_calls=[ToolCall(name="a")])]},
            "messages[0].tool_calls",
            "CALLS_OF_ROLE",
        ),
        (
            {"messages": [Message(role="assistant", tool_calls=[NO_OBJECT])]},
            "messages[0].tool_calls[0].arguments",
            "NO_OBJECT",
        ),
        (
            {"messages": [Message(role="tool", tool_call_id="x" * 257)]},
            "messages[0].tool_call_id",
            "ID_LENGTH",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_an_invalid_field_is_named(
    tools: Stack, change: dict[str, Any], field: str, reason: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await tools.inference.Generate(pb.GenerateRequest(conversation=conversation(**change)))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert info_of(caught.value).reason == reason
    assert field_of(caught.value) == f"conversation.{field}"


REQUIRED = ToolChoice(mode="TOOL_CHOICE_MODE_REQUIRED")
STRICT = [Tool(name="weather", parameters='{"type": "object"}', strict=True)]


@pytest.mark.parametrize(
    "change",
    [{"tool_choice": REQUIRED}, {"tool_choice": ToolChoice(name="now")}, {"tools": STRICT}],
    ids=["required", "named", "strict"],
)
async def test_a_grammar_holds_calls_to_their_schemas(tools: Stack, change: dict[str, Any]) -> None:
    request = pb.GenerateRequest(conversation=conversation(**change))
    call = tools.inference.Generate(request)
    sent = await tools.scheduler.submissions.get()
    grammar = logits_pb2.LogitsParams.FromString(sent.params.logits_params).grammar
    assert "tool_call" in grammar.definition
    # Behind the reasoning.
    assert list(grammar.begins_after_token_ids) == tools.encode("</think>")
    assert state_of(sent).parsing.guided
    call.cancel()


FORMATS = {
    "schema": StructuredOutput(json_schema='{"type": "object", "properties": {"c": {}}}'),
    "object": StructuredOutput(json_object=JsonObject()),
    "regex": StructuredOutput(regex="c+"),
    # The first one spelled by ordinary tokens; a rule has fewer options.
    "choice": StructuredOutput(
        choice=Texts(texts=[gateway_tokenizers.EOS, *map(str, range(2000))])
    ),
    "grammar": StructuredOutput(grammar='start: "c" | "d"'),
}


async def test_content_follows_its_format_where_no_tool_is_called(tools: Stack) -> None:
    for name, output in FORMATS.items():
        params = pb.SamplingParams(structured_output=output)
        wanted = pb.GenerateRequest(conversation=conversation(), sampling_params=params)
        call = tools.inference.Generate(wanted)
        sent = await tools.scheduler.submissions.get()
        grammar = logits_pb2.LogitsParams.FromString(sent.params.logits_params).grammar
        assert "tool_call" in grammar.definition, name
        assert "<[" not in grammar.definition, name
        assert list(grammar.begins_after_token_ids) == tools.encode("</think>")
        # Content may begin like a call, so that one is certain at its end only.
        parsing = state_of(sent).parsing
        assert (parsing.guided, parsing.calls_or_content) == (False, True)
        call.cancel()


async def test_guided_arguments_are_objects(tools: Stack) -> None:
    schema = '{"anyOf": [{"type": "integer"}, {"type": "object"}]}'
    wanted = conversation(tools=[Tool(name="a", parameters=schema)], tool_choice=REQUIRED)
    call = tools.inference.Generate(pb.GenerateRequest(conversation=wanted))
    sent = await tools.scheduler.submissions.get()
    grammar = logits_pb2.LogitsParams.FromString(sent.params.logits_params).grammar
    assert '}], "type": "object", "x-guidance"' in grammar.definition
    call.cancel()


def state_of(sent: scheduler_pb2.Submission) -> gateway_pb2.ResumeState:
    return gateway_pb2.ResumeState.FromString(sent.opaque)


async def test_a_continued_message_is_content_or_reasoning_that_was_cut(tools: Stack) -> None:
    """Its tools and formats are those of a message that begins."""
    params = pb.SamplingParams(structured_output=StructuredOutput(choice=Texts(texts=["a", "b"])))
    for content, is_reasoning in (("So", False), ("<think>x</think>So", False), ("<think>x", True)):
        spoken = conversation(continue_final_message=True)
        spoken.messages.add(role="assistant", content=content)
        text = f" y</think>{tools_model.CALLS}" if is_reasoning else f" y{tools_model.CALLS}"
        call = tools.inference.Generate(pb.GenerateRequest(conversation=spoken))
        await tools.scheduler.serve_one(tools.encode(text))
        [choice] = (await call).choices
        found = (choice.reasoning, choice.text)
        assert found == (("y", "") if is_reasoning else ("", " y"))
        assert [one.name for one in choice.tool_calls] == ["weather", "now"]
        spoken.ClearField("tools")
        request = pb.GenerateRequest(conversation=spoken, sampling_params=params)
        call = tools.inference.Generate(request)
        submission = await tools.scheduler.serve_one(tools.encode("a"))
        await call
        grammar = logits_pb2.LogitsParams.FromString(submission.params.logits_params).grammar
        ids = tools.encode("</think>") if is_reasoning else []
        assert list(grammar.begins_after_token_ids) == ids


async def test_free_calls_have_no_grammar(tools: Stack) -> None:
    call = tools.inference.Generate(pb.GenerateRequest(conversation=conversation()))
    sent = await tools.scheduler.submissions.get()
    assert not logits_pb2.LogitsParams.FromString(sent.params.logits_params).HasField("grammar")
    assert not state_of(sent).parsing.guided
    call.cancel()


async def test_a_call_can_be_forced_where_the_format_is_not_known(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Shards, "max_model_len", 4096)
    text = '[{"name": "now", "parameters": {"a": 1}}]'
    response = await generated(stack, text, conversation(tool_choice=REQUIRED))
    [call] = response.choices[0].tool_calls
    assert (call.name, call.arguments) == ("now", '{"a": 1}')


async def test_guided_arguments_are_sent_as_they_come(tools: Stack) -> None:
    request = pb.StreamGenerateRequest(conversation=conversation(tool_choice=REQUIRED))
    call = tools.inference.StreamGenerate(request)
    write(tools, await tools.scheduler.submissions.get(), tools.encode(tools_model.OUTPUT))
    deltas = [delta async for response in call for delta in response.deltas]
    parts = [one.arguments for delta in deltas for one in delta.tool_calls if one.index == 0]
    assert "".join(parts) == tools_model.ARGUMENTS
    assert len([part for part in parts if part]) > 3


REFUSED_SCHEMA = Tool(name="b", parameters='{"properties": {"a": {"not": {"type": "null"}}}}')
TAG = '{"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}'
SKIPPING = '%llguidance {"allow_initial_skip": true}\nstart: "a"\n%ignore / /'


@pytest.mark.parametrize(
    ("change", "params", "field", "reason"),
    [
        (
            {"tools": [Tool(name="a"), REFUSED_SCHEMA], "tool_choice": REQUIRED},
            pb.SamplingParams(),
            "conversation.tools[1].parameters",
            "UNSUPPORTED_SCHEMA",
        ),
        (
            {
                "tools": [
                    Tool(name=f"t{at}", parameters='{"pattern": "%s"}' % ("a?" * (400 + at % 2)))
                    for at in range(3)
                ],
                "tool_choice": REQUIRED,
            },
            pb.SamplingParams(),
            "conversation.tools[1].parameters",
            "UNSUPPORTED_SCHEMA",
        ),
        (
            {"tools": [Tool(name="a", parameters='{"type": ["array"]}')], "tool_choice": REQUIRED},
            pb.SamplingParams(),
            "conversation.tools[0].parameters",
            "UNSUPPORTED_SCHEMA",
        ),
        (
            {"tools": [Tool(name="a", parameters='{"enum": [1]}')], "tool_choice": REQUIRED},
            pb.SamplingParams(),
            "conversation.tools[0].parameters",
            "UNSUPPORTED_SCHEMA",
        ),
        (
            {"tool_choice": REQUIRED},
            pb.SamplingParams(ignore_eos=True),
            "sampling_params.ignore_eos",
            "IGNORE_EOS_WITH_FORMAT",
        ),
        (
            {},
            pb.SamplingParams(structured_output=StructuredOutput(structural_tag=TAG)),
            "sampling_params.structured_output.structural_tag",
            "FORMAT_WITH_TOOLS",
        ),
        (
            {},
            pb.SamplingParams(structured_output=StructuredOutput(regex="(")),
            "sampling_params.structured_output.regex",
            "INVALID_FORMAT",
        ),
        (
            {},
            pb.SamplingParams(structured_output=StructuredOutput(grammar=SKIPPING)),
            "sampling_params.structured_output.grammar",
            "FORMAT_WITH_TOOLS",
        ),
    ],
    ids=["schema", "quantifiers", "type", "no object", "ignore_eos", "tag", "regex", "skip"],
)
async def test_what_cannot_be_guided_is_refused(
    tools: Stack, change: dict[str, Any], params: pb.SamplingParams, field: str, reason: str
) -> None:
    request = pb.GenerateRequest(conversation=conversation(**change), sampling_params=params)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await tools.inference.Generate(request)
    assert (field_of(caught.value), info_of(caught.value).reason) == (field, reason)


async def test_tools_are_refused_where_calls_cannot_be_read(stack: Stack) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.inference.Generate(pb.GenerateRequest(conversation=conversation()))
    assert info_of(caught.value).reason == "UNKNOWN_TOOL_FORMAT"
    assert field_of(caught.value) == "conversation.tools"


TRAINED = gateway_tokenizers.byte_level().to_str()


def model_with(markers: Sequence[str]) -> Model:
    """A model in which these markers are special tokens."""
    tokenizer = Tokenizer.from_str(TRAINED)
    tokenizer.add_special_tokens(
        [AddedToken(marker, special=True, normalized=False) for marker in (*markers, "<|other|>")]
    )
    files = ModelFiles(tokenizer, tokenizer.get_vocab_size(), None, (1,), None)
    return Model.from_files("m", files, None)  # type: ignore[arg-type]


def updates(
    state: gateway_pb2.ResumeState, model: Model, ids: Sequence[int], next_index: int = 0
) -> list[ChoiceUpdate]:
    [choice] = create_choices("r", state, model, [next_index])
    parts = [choice.process([NewTokens(0, at, (id_,))]) for at, id_ in enumerate(ids)]
    return [*parts, choice.process([Ended(0, STOP, 1, len(ids), 0)])]


def pieces_of(parts: Sequence[ChoiceUpdate]) -> list[Piece]:
    return joined(one.piece for part in parts for one in part.pieces)


@pytest.mark.parametrize("recorded", RECORDED.values(), ids=RECORDED)
def test_cuts_are_resumed_with_markers_as_special_tokens(recorded: Recorded) -> None:
    options = recorded.options()
    state = gateway_pb2.ResumeState(
        num_choices=1,
        skip_special_tokens=True,
        stop_token_ids=[1],
        parsing=gateway_pb2.OutputParsing(
            tool_format=options.tool_format,
            reasoning_format=options.reasoning_format,
            reasoning_is_open=options.is_reasoning_open,
            tool_names=list(options.tools.schemas),
            tool_schemas=[],
        ),
    )
    markers = ModelFormats(options.tool_format, options.reasoning_format).markers
    model = model_with(sorted(markers))
    ids = [*model.files.tokenizer.encode(recorded.text, add_special_tokens=False).ids]
    other = model.files.tokenizer.token_to_id("<|other|>")
    ids = [*ids[:3], other, *ids[3:], 1]
    whole = updates(state, model, ids)
    pieces = pieces_of(whole)
    assert "".join(p.text for p in pieces if isinstance(p, Content)) == recorded.content
    assert "".join(p.text for p in pieces if isinstance(p, Reasoning)) == recorded.reasoning
    calls = [call for part in whole for call in part.tool_calls]
    assert [call.name for call in calls if call.name] == [name for name, _ in recorded.calls]
    end = whole[-1].end
    assert end is not None
    assert end.has_calls == bool(recorded.calls)
    # Every one of a short text; a prime keeps the others apart from its structure.
    for at in range(0, len(ids), 1 if len(ids) < 40 else 11):
        after = updates(state, model, ids, at)
        assert joined([*pieces_of(whole[:at]), *pieces_of(after)]) == pieces
        ids_of_calls = [call.id for part in (*whole[:at], *after) for call in part.tool_calls]
        assert ids_of_calls == [call.id for call in calls]


@pytest.mark.parametrize(
    "recorded",
    [one for one in RECORDED.values() if len(one.calls) > 1],
    ids=[name for name, one in RECORDED.items() if len(one.calls) > 1],
)
def test_an_end_with_the_only_call_is_resumed(recorded: Recorded) -> None:
    options = recorded.options()
    state = gateway_pb2.ResumeState(
        num_choices=1,
        skip_special_tokens=True,
        stop_token_ids=[1],
        parsing=gateway_pb2.OutputParsing(
            tool_format=options.tool_format,
            reasoning_format=options.reasoning_format,
            reasoning_is_open=options.is_reasoning_open,
            tool_names=list(options.tools.schemas),
            single_call=True,
        ),
    )
    model = model_with(sorted(ModelFormats(options.tool_format, options.reasoning_format).markers))
    ids = model.files.tokenizer.encode(recorded.text, add_special_tokens=False).ids
    whole = updates(state, model, ids)
    kept = [token_id for part in whole for token_id in part.token_ids]
    assert kept == ids[: len(kept)]
    assert 0 < len(kept) < len(ids)
    calls = [call for part in whole for call in part.tool_calls]
    assert [call.name for call in calls if call.name] == [recorded.calls[0][0]]
    end = whole[-1].end
    assert end is not None
    assert (end.by_call, end.is_stop, end.stop_token_id) == (True, True, None)
    for at in range(0, len(kept) + 1, 7):
        after = updates(state, model, ids, at)
        assert joined([*pieces_of(whole[:at]), *pieces_of(after)]) == pieces_of(whole)
        assert after[-1].end == end
