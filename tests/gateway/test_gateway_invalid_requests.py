"""Invalid and malformed requests: the status, and the field it names."""

import math
import threading
from collections.abc import Sequence

import grpc
import pytest
from gateway_fake_scheduler import MAX_MODEL_LEN
from gateway_stack import Stack, field_of, info_of
from gateway_violations import unknown_part
from google.protobuf import any_pb2, descriptor_pb2, json_format, struct_pb2
from grpc_status import rpc_status

from gateway_svc.generation import validation
from gateway_svc.text.chat_template import ChatTemplate
from gateway_svc.text.served_model import ModelLimits
from quire.service.errors import invalid
from quire.v1 import beam_search_pb2, inference_pb2_grpc, model_pb2, tokenizer_pb2
from quire.v1 import inference_pb2 as pb
from quire.v1.conversation_pb2 import (
    Conversation,
    Document,
    DocumentField,
    Message,
    ToolCall,
)

INVALID = grpc.StatusCode.INVALID_ARGUMENT


def sampling(**params: object) -> dict[str, object]:
    return {"text": "ok", "sampling_params": pb.SamplingParams(**params)}


def tokens(*ids: int) -> dict[str, object]:
    return {"token_ids": pb.TokenIds(ids=ids)}


def conversation(*roles: str, documents: Sequence[Document] = ()) -> dict[str, object]:
    messages = [Message(role=role, content="x") for role in roles]
    return {"conversation": Conversation(messages=messages, documents=documents)}


def document(*names: str) -> Document:
    return Document(fields=[DocumentField(name=name, text="x") for name in names])


INVALID_REQUESTS = {
    "no prompt": ({}, "text"),
    "empty text": ({"text": ""}, "text"),
    "empty token ids": (tokens(), "token_ids.ids"),
    "text too long": ({"text": "a " * MAX_MODEL_LEN}, "text"),
    "text that cannot fit": ({"text": "a" * 2**20}, "text"),
    "token ids too long": (tokens(*[1] * MAX_MODEL_LEN), "token_ids.ids"),
    "token id outside": (tokens(1, 2, 3, 100_000), "token_ids.ids[3]"),
    "no messages": (conversation(), "conversation"),
    "refused role": (conversation("wizard"), "conversation"),
    "many messages": (conversation(*["user"] * 4097), "conversation.messages"),
    "document without fields": (
        conversation("user", documents=[document("text"), document()]),
        "conversation.documents[1].fields",
    ),
    "document with a field twice": (
        conversation("user", documents=[document("text", "title", "text")]),
        "conversation.documents[0].fields",
    ),
    "document with many fields": (
        conversation("user", documents=[document(*map(str, range(65)))]),
        "conversation.documents[0].fields",
    ),
    "many documents": (
        conversation("user", documents=[document("text")] * 1025),
        "conversation.documents",
    ),
    "documents that no template renders": (
        conversation("user", documents=[document("text")]),
        "conversation",
    ),
    "long document": (
        conversation("user", documents=[Document(fields=[DocumentField(text="x" * 10**6)])]),
        "conversation",
    ),
    "long role": (conversation("user", "r" * 65), "conversation.messages[1].role"),
    "long cache salt": ({"text": "a", "cache_salt": "é" * 129}, "cache_salt"),
    "empty request id": ({"text": "a", "request_id": ""}, "request_id"),
    "escape sequence in a request id": ({"text": "a", "request_id": "a\x1b[2J"}, "request_id"),
    "line break in a request id": ({"text": "a", "request_id": "a\nb"}, "request_id"),
    "space in a request id": ({"text": "a", "request_id": "a b"}, "request_id"),
    "request id beyond ASCII": ({"text": "a", "request_id": "\u00e9"}, "request_id"),
    "long request id": ({"text": "a", "request_id": "a" * 129}, "request_id"),
    "negative temperature": (sampling(temperature=-0.5), "sampling_params.temperature"),
    "temperature nan": (sampling(temperature=math.nan), "sampling_params.temperature"),
    "temperature inf": (sampling(temperature=math.inf), "sampling_params.temperature"),
    "top_p 0": (sampling(top_p=0), "sampling_params.top_p"),
    "top_p above 1": (sampling(top_p=1.5), "sampling_params.top_p"),
    "top_p nan": (sampling(top_p=math.nan), "sampling_params.top_p"),
    "min_p below 0": (sampling(min_p=-0.1), "sampling_params.min_p"),
    "min_p above 1": (sampling(min_p=1.5), "sampling_params.min_p"),
    "min_p nan": (sampling(min_p=math.nan), "sampling_params.min_p"),
    "max_tokens 0": (sampling(max_tokens=0), "sampling_params.max_tokens"),
    "n 0": (sampling(n=0), "sampling_params.n"),
    "n 17": (sampling(n=17), "sampling_params.n"),
    "n beyond all bounds": (sampling(n=2**32 - 1), "sampling_params.n"),
    "logprobs 21": (sampling(logprobs=21), "sampling_params.logprobs"),
    "prompt_logprobs 21": (sampling(prompt_logprobs=21), "sampling_params.prompt_logprobs"),
    "logprobs beyond all bounds": (sampling(logprobs=2**32 - 1), "sampling_params.logprobs"),
    "empty stop": (sampling(stop=["a", ""]), "sampling_params.stop[1]"),
    "long stop": (sampling(stop=["a" * 257]), "sampling_params.stop[0]"),
    "many stops": (sampling(stop=["a"] * 17), "sampling_params.stop"),
    "many stop ids": (sampling(stop_token_ids=[1] * 257), "sampling_params.stop_token_ids"),
    "presence_penalty 2.5": (sampling(presence_penalty=2.5), "sampling_params.presence_penalty"),
    "frequency_penalty nan": (
        sampling(frequency_penalty=math.nan),
        "sampling_params.frequency_penalty",
    ),
    "repetition_penalty 0": (
        sampling(repetition_penalty=0),
        "sampling_params.repetition_penalty",
    ),
    "typical_p 0": (sampling(typical_p=0), "sampling_params.typical_p"),
    "min_tokens above max_tokens": (
        sampling(min_tokens=5, max_tokens=4),
        "sampling_params.min_tokens",
    ),
    "bias 101": (sampling(logit_bias={7: 101}), "sampling_params.logit_bias[7]"),
    "bias outside": (sampling(logit_bias={100_000: 1}), "sampling_params.logit_bias[100000]"),
    "nothing allowed": (
        sampling(allowed_token_ids=pb.TokenIds()),
        "sampling_params.allowed_token_ids.ids",
    ),
    "allowed outside": (
        sampling(allowed_token_ids=pb.TokenIds(ids=[5, 100_000])),
        "sampling_params.allowed_token_ids.ids[1]",
    ),
    "empty bad word": (sampling(bad_words=["a", ""]), "sampling_params.bad_words[1]"),
    "many bad words": (sampling(bad_words=["a"] * 129), "sampling_params.bad_words"),
    "unknown logprobs_mode": (sampling(logprobs_mode=99), "sampling_params.logprobs_mode"),
    "large processor_args": (
        sampling(processor_args=json_format.ParseDict({"a": "x" * 2**14}, struct_pb2.Struct())),
        "sampling_params.processor_args",
    ),
    "infinite chat_template_kwargs": (
        {
            "conversation": Conversation(
                messages=[Message(role="user", content="a")],
                chat_template_kwargs=struct_pb2.Struct(
                    fields={"a": struct_pb2.Value(number_value=math.inf)}
                ),
            )
        },
        "conversation.chat_template_kwargs",
    ),
    "top_p just above 1": (sampling(top_p=1.0000001), "sampling_params.top_p"),
    "stop id outside": (sampling(stop_token_ids=[100_000]), "sampling_params.stop_token_ids[0]"),
}


@pytest.mark.parametrize("name", INVALID_REQUESTS)
async def test_the_invalid_field_is_named(stack: Stack, name: str) -> None:
    parts, field = INVALID_REQUESTS[name]
    for call in (
        stack.inference.Generate(pb.GenerateRequest(**parts)),
        stack.inference.StreamGenerate(pb.StreamGenerateRequest(**parts)).read(),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is INVALID
        assert field_of(caught.value) == field
        assert str(caught.value.details()).startswith(f"{field}: ")
    assert stack.scheduler.submissions.empty()
    await stack.check_next_request()


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("sampling_params.stop[1]", None),
        ("conversation.messages[0].role", None),
        ("conversation.chat_template_kwargs.enable_thinking", None),
        ("prompt", "prompt"),
        ("conversation.roles[0]", "roles[0]"),
        ("model[0]", "model[0]"),
        ("model.name", "name"),
        ("", ""),
    ],
)
def test_a_path_is_compared_with_the_request(path: str, part: str | None) -> None:
    assert unknown_part(path, pb.GenerateRequest.DESCRIPTOR) == part


def test_unary_and_streamed_requests_have_the_same_fields() -> None:
    """A client that changes the method changes nothing else, and each can repeat the other's."""
    for unary, streamed in (
        (pb.GenerateRequest, pb.StreamGenerateRequest),
        (pb.StreamGenerateResponse, pb.ResumeGenerateResponse),
    ):
        protos = [descriptor_pb2.DescriptorProto() for _ in range(2)]
        for message, proto in zip((unary, streamed), protos, strict=True):
            message.DESCRIPTOR.CopyToProto(proto)
            proto.ClearField("name")
        assert protos[0] == protos[1]
        assert protos[0].field


def test_a_search_has_the_fields_of_other_requests() -> None:
    """Its client serializes them as those of a GenerateRequest."""
    numbers = [
        {field.name: (field.number, field.type) for field in message.DESCRIPTOR.fields}
        for message in (pb.GenerateRequest, beam_search_pb2.BeamSearchRequest)
    ]
    (sampling, _), (params, _) = numbers[0].pop("sampling_params"), numbers[1].pop("params")
    assert numbers[0] == numbers[1]
    assert {sampling, params}.isdisjoint(number for number, _ in numbers[0].values())


@pytest.mark.parametrize(
    ("parts", "field"),
    [
        ({"text": "The"}, "text"),
        (tokens(5), "token_ids.ids"),
        (conversation("user"), "conversation"),
    ],
)
async def test_the_schedulers_error_names_the_clients_field(
    stack: Stack, parts: dict[str, object], field: str
) -> None:
    """The scheduler knows a single prompt."""
    details = [any_pb2.Any() for _ in range(2)]
    error = invalid("prompt", "PROMPT_TOO_LONG", "has 9 tokens")
    for packed, detail in zip(details, error.details, strict=True):
        packed.Pack(detail)
    call = stack.inference.StreamGenerate(pb.StreamGenerateRequest(**parts))
    submission = await stack.scheduler.submissions.get()
    stack.scheduler.fail(submission, INVALID, details=details)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert field_of(caught.value) == field
    assert caught.value.details() == f"{field}: has 9 tokens"

    # A request to resume has no such field.
    resumed = stack.inference.ResumeGenerate(pb.ResumeGenerateRequest(request_id="a"))
    attachment = await stack.scheduler.attachments.get()
    stack.scheduler.fail(attachment, INVALID, details=details)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await resumed.read()
    assert info_of(refused.value).reason == "PROMPT_TOO_LONG"
    status = rpc_status.from_call(refused.value)
    assert status is not None
    assert len(status.details) == 1


async def test_errors_print_numbers_as_written(stack: Stack) -> None:
    for written, expected in ((1.0000001, "1.0000001"), (1.5, "1.5"), (-0.1, "-0.1")):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.inference.Generate(pb.GenerateRequest(**sampling(top_p=written)))
        assert f"is {expected};" in str(caught.value.details())


async def test_a_long_error_of_the_template_is_cut(stack: Stack, monkeypatch) -> None:
    source = "{{ raise_exception(messages[0].content) }}"
    files = stack.gateway.served.get(None).files
    monkeypatch.setitem(files.__dict__, "chat_template", ChatTemplate(source, {}))
    monkeypatch.setattr(validation, "check_text", lambda *_: None)
    messages = [Message(role="user", content="日" * 10**6)]
    request = pb.GenerateRequest(conversation=Conversation(messages=messages))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.inference.Generate(request)
    assert caught.value.code() is INVALID
    assert field_of(caught.value) == "conversation"
    assert "日日日" in str(caught.value.details())


@pytest.mark.parametrize(
    "method",
    [
        "quire.v1.InferenceService/Generate",
        "quire.v1.InferenceService/StreamGenerate",
        "quire.v1.TokenizerService/Tokenize",
        "grpc.health.v1.Health/Watch",
    ],
)
# A truncated field, and text that is not UTF-8.
@pytest.mark.parametrize("data", [b"\x0a\xff", b"\x0a\x01\xff"])
async def test_malformed_requests_are_invalid_arguments(
    stack: Stack, method: str, data: bytes
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.channel.unary_stream(f"/{method}")(data).read()
    assert caught.value.code() is INVALID
    assert "Error" not in str(caught.value.details())
    await stack.check_next_request()


async def test_an_unknown_method_is_unimplemented(stack: Stack) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.channel.unary_unary("/quire.v1.InferenceService/Nothing")(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_an_unknown_model_is_not_found(stack: Stack) -> None:
    for call, field in (
        (stack.inference.Generate(pb.GenerateRequest(text="a", model="other")), "model"),
        (stack.tokenizer.Tokenize(tokenizer_pb2.TokenizeRequest(model="other")), "model"),
        (stack.models.GetModel(model_pb2.GetModelRequest(name="other")), "name"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert field_of(caught.value) == field
        assert "'tiny'" in str(caught.value.details())
    await stack.check_next_request()


@pytest.mark.parametrize(
    ("megabytes", "code", "field"),
    [(1.5, "INVALID_ARGUMENT", "text"), (40, "RESOURCE_EXHAUSTED", None)],
)
async def test_megabytes_of_text_are_rejected(
    stack: Stack, megabytes: float, code: str, field: str
) -> None:
    """Beyond the message limit gRPC itself rejects them, and cannot name the field."""
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(stack.address, options=options) as channel:
        generate = inference_pb2_grpc.InferenceServiceStub(channel).Generate
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(pb.GenerateRequest(text="a" * int(megabytes * 2**20)))
    assert caught.value.code().name == code
    if field is not None:
        assert field_of(caught.value) == field
    await stack.check_next_request()


async def test_control_characters_are_tokenized(stack: Stack) -> None:
    call = stack.inference.Generate(pb.GenerateRequest(text="a\0b\x1b\n"))
    submission = await stack.scheduler.serve_one(stack.encode("fox"))
    assert list(submission.prompt_token_ids) == stack.encode("a\0b\x1b\n")
    await call


async def test_a_conversation_needs_a_chat_template(stack: Stack, monkeypatch) -> None:
    files = stack.gateway.served.get(None).files
    monkeypatch.setitem(files.__dict__, "chat_template", None)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.inference.Generate(pb.GenerateRequest(**conversation("user")))
    assert field_of(caught.value) == "conversation"


async def test_max_tokens_is_capped_by_the_context(stack: Stack) -> None:
    params = pb.SamplingParams(max_tokens=10**6, temperature=0, seed=0)
    call = stack.inference.Generate(pb.GenerateRequest(text="ab", sampling_params=params))
    submission = await stack.scheduler.serve_one([5])
    await call
    assert submission.params.max_tokens == MAX_MODEL_LEN - len(submission.prompt_token_ids)
    assert (submission.params.temperature, submission.params.seed) == (0, 0)


async def test_ids_of_other_calls_have_no_control_characters(stack: Stack) -> None:
    for call in (
        stack.inference.CancelGenerate(pb.CancelGenerateRequest(request_id="a\x1b[2J")),
        stack.inference.ResumeGenerate(pb.ResumeGenerateRequest(request_id="a\x1b[2J")).read(),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is INVALID
        assert "has U+001B at character 1" in str(caught.value.details())


async def test_a_large_request_is_checked_beside_the_event_loop(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    check = validation.check_request

    def recorded(request: validation.GenerationRequest, limits: ModelLimits) -> None:
        threads.append(threading.current_thread())
        check(request, limits)

    monkeypatch.setattr(validation, "check_request", recorded)
    calls = [ToolCall(id="a", name="f", arguments="{}")] * 100
    message = Message(role="assistant", tool_calls=calls)
    request = pb.GenerateRequest(conversation=Conversation(messages=[message] * 40))
    request.conversation.messages[-1].tool_calls[-1].arguments = "1"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.inference.Generate(request)
    assert field_of(caught.value) == "conversation.messages[39].tool_calls[99].arguments"
    assert threads
    assert threading.main_thread() not in threads


async def test_a_large_conversation_to_tokenize_is_checked_in_a_thread(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    check = validation.check_conversation

    def recorded(conversation: Conversation, limits: ModelLimits) -> None:
        threads.append(threading.current_thread())
        check(conversation, limits)

    monkeypatch.setattr(validation, "check_conversation", recorded)
    calls = [ToolCall(id="a", name="f", arguments="{}")] * 100
    messages = [Message(role="assistant", tool_calls=calls)] * 40
    messages[-1].tool_calls[-1].arguments = "1"
    request = tokenizer_pb2.TokenizeRequest(conversation=Conversation(messages=messages))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.tokenizer.Tokenize(request)
    assert str(field_of(caught.value)).endswith(".tool_calls[99].arguments")
    assert threads
    assert threading.main_thread() not in threads


async def test_megabytes_of_arguments_are_not_parsed(stack: Stack) -> None:
    call = ToolCall(id="a", name="f", arguments="{" + "1," * 2**21)
    message = Message(role="assistant", tool_calls=[call])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.inference.Generate(pb.GenerateRequest(conversation={"messages": [message]}))
    assert info_of(caught.value).reason == "CALLS_SIZE"
    assert field_of(caught.value) == "conversation.messages"
