"""Traces in the gateway: contexts from metadata and headers, and the span of each call."""

import asyncio
from collections.abc import Callable, Iterator

import grpc
import pytest
import structlog
from gateway_stack import Stack
from http_client import Http
from listed_spans import ListedSpans
from waiting import until

from gateway_svc.server import Gateway
from gateway_svc.settings import GatewaySettings
from quire.service.tracing.context import TraceContext
from quire.v1 import conversation_pb2, model_pb2
from quire.v1 import inference_pb2 as pb

PARENT = TraceContext(0xABC, 0xDEF, is_sampled=True, tracestate="a=b")
METADATA = (("traceparent", PARENT.traceparent), ("tracestate", PARENT.tracestate))


@pytest.fixture
def spans() -> ListedSpans:
    return ListedSpans()


@pytest.fixture
def settings_for(
    settings_for: Callable[..., GatewaySettings],
    spans: ListedSpans,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Callable[..., GatewaySettings]:
    """Settings of a gateway that exports spans, unless the test's parameter is `off`."""
    mode = getattr(request, "param", "on")
    exporter = None if mode == "off" else spans
    monkeypatch.setattr(GatewaySettings, "span_exporter", lambda settings, service: exporter)
    ratio = 0.0 if mode == "unsampled" else 1.0

    def build(**changes: object) -> GatewaySettings:
        return settings_for(trace_sampling_ratio=ratio, **changes)

    return build


@pytest.fixture
def logged() -> Iterator[list[structlog.typing.EventDict]]:
    with structlog.testing.capture_logs([structlog.contextvars.merge_contextvars]) as records:
        yield records


async def test_a_call_continues_the_trace_of_its_client(
    stack: Stack, spans: ListedSpans, logged: list[structlog.typing.EventDict]
) -> None:
    params = pb.SamplingParams(max_tokens=7, temperature=0.5)
    request = pb.GenerateRequest(text="The", sampling_params=params, request_id="r", model="tiny")
    call = stack.inference.Generate(request, metadata=METADATA)
    submission = await stack.scheduler.serve_one(stack.encode("fox"))
    response = await call
    span = spans.only("quire.v1.InferenceService/Generate")
    assert span.parent == PARENT
    assert span.context.trace_id == PARENT.trace_id
    assert span.context.span_id != PARENT.span_id
    assert (span.is_server, span.error) == (True, None)
    # The scheduler's spans are children of this one.
    assert submission.trace_context.traceparent == span.context.traceparent
    assert submission.trace_context.tracestate == "a=b"
    assert span.attributes == {
        "rpc.system.name": "grpc",
        "rpc.method": "quire.v1.InferenceService/Generate",
        "rpc.response.status_code": "OK",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.response.id": "r",
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": response.usage.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.output_tokens": response.usage.completion_tokens,
        "gen_ai.usage.reasoning.output_tokens": 0,
        "quire.deferred_delivery": True,
    }
    [event] = span.events
    assert event.name == "first token"
    assert span.start_ns <= event.time_ns <= span.end_ns
    [ended] = [record for record in logged if record["event"] == "request ended"]
    assert ended["trace_id"] == PARENT.trace_id_hex


async def test_a_trace_begins_here_without_a_client_s(stack: Stack, spans: ListedSpans) -> None:
    message = conversation_pb2.Message(role="user", content="x")
    request = pb.StreamGenerateRequest(
        conversation=conversation_pb2.Conversation(messages=[message])
    )
    for metadata in ((), (("traceparent", "not a context"),)):
        call = stack.inference.StreamGenerate(request, metadata=metadata)
        submission = await stack.scheduler.serve_one(stack.encode("fox"))
        async for _ in call:
            pass
        await until(lambda: spans.spans, "the span")
        span = spans.spans.pop()
        assert span.parent is None
        assert span.context.is_sampled
        assert submission.trace_context.traceparent == span.context.traceparent
        assert span.attributes["gen_ai.operation.name"] == "chat"


@pytest.mark.parametrize("settings_for", ["unsampled"], indirect=True)
async def test_the_client_s_decision_precedes_the_ratio(stack: Stack, spans: ListedSpans) -> None:
    unsampled = TraceContext(7, 8, is_sampled=False).traceparent
    for metadata, is_sampled in (
        ((), False),
        ((("traceparent", unsampled),), False),
        (METADATA, True),
    ):
        call = stack.inference.Generate(pb.GenerateRequest(text="The"), metadata=metadata)
        submission = await stack.scheduler.serve_one(stack.encode("fox"))
        await call
        sent = TraceContext.parse(submission.trace_context.traceparent)
        assert sent is not None
        assert sent.is_sampled == is_sampled
        assert len(spans.spans) == is_sampled


@pytest.mark.parametrize("settings_for", ["off"], indirect=True)
async def test_a_gateway_without_export_passes_a_context_on(stack: Stack) -> None:
    for metadata, expected in ((METADATA, PARENT.traceparent), ((), "")):
        call = stack.inference.Generate(pb.GenerateRequest(text="The"), metadata=metadata)
        submission = await stack.scheduler.serve_one(stack.encode("fox"))
        await call
        assert submission.trace_context.traceparent == expected
        assert submission.HasField("trace_context") == bool(expected)


async def test_the_span_of_a_failed_call_has_its_status(stack: Stack, spans: ListedSpans) -> None:
    refused = stack.inference.Generate(pb.GenerateRequest(text=""), metadata=METADATA)
    with pytest.raises(grpc.aio.AioRpcError):
        await refused
    await until(lambda: len(spans.spans) == 1, "the span")
    # A client's mistake is no error of the server.
    assert spans.spans[0].attributes["rpc.response.status_code"] == "INVALID_ARGUMENT"
    assert spans.spans[0].error is None
    failing = stack.inference.Generate(pb.GenerateRequest(text="The"), metadata=METADATA)
    stack.scheduler.fail(await stack.scheduler.submissions.get(), grpc.StatusCode.INTERNAL)
    with pytest.raises(grpc.aio.AioRpcError):
        await failing
    await until(lambda: len(spans.spans) == 2, "the span")
    assert spans.spans[1].attributes["rpc.response.status_code"] == "INTERNAL"
    assert spans.spans[1].error == "gRPC status INTERNAL"
    assert "gen_ai.response.finish_reasons" not in spans.spans[1].attributes


async def test_the_span_of_a_client_that_left_is_cancelled(
    stack: Stack, spans: ListedSpans
) -> None:
    call = stack.inference.StreamGenerate(pb.StreamGenerateRequest(text="The"), metadata=METADATA)
    stack.scheduler.accept(await stack.scheduler.submissions.get())
    await call.read()
    call.cancel()
    await until(lambda: spans.spans, "the span")
    assert spans.spans[0].attributes["rpc.response.status_code"] == "CANCELLED"
    await stack.check_next_request()


async def test_calls_without_a_generation_are_not_traced(stack: Stack, spans: ListedSpans) -> None:
    await stack.models.ListModels(model_pb2.ListModelsRequest(), metadata=METADATA)
    assert spans.spans == []


async def test_an_http_request_continues_its_trace(http: Http, spans: ListedSpans) -> None:
    body = {"model": "tiny", "prompt": ["The", "A"], "max_tokens": 4}
    sending = http.start(
        "/v1/completions", body, traceparent=PARENT.traceparent, tracestate=PARENT.tracestate
    )
    fox = http.stack.encode("fox")
    submissions = [await http.stack.scheduler.serve_one(fox) for _ in range(2)]
    usage = (await sending).json()["usage"]
    await until(lambda: spans.spans, "the span")
    span = spans.only("POST /v1/completions")
    assert span.parent == PARENT
    assert {one.trace_context.traceparent for one in submissions} == {span.context.traceparent}
    attributes = span.attributes
    assert attributes["http.request.method"] == "POST"
    assert attributes["http.route"] == attributes["url.path"] == "/v1/completions"
    assert attributes["http.response.status_code"] == 200
    # Of both prompts.
    assert attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert attributes["gen_ai.response.finish_reasons"] == ["length", "length"]
    assert [event.name for event in span.events] == ["first token"] * 2


async def test_the_span_of_a_refused_http_request_has_its_status(
    http: Http, spans: ListedSpans
) -> None:
    await http.error("/v1/completions", {"prompt": 3}, traceparent=PARENT.traceparent)
    await http.client.get("/v1/responses/resp_x y", headers={"traceparent": PARENT.traceparent})
    await http.client.get("/v1/models", headers={"traceparent": PARENT.traceparent})
    await http.client.get("/health", headers={"traceparent": PARENT.traceparent})
    await until(lambda: len(spans.spans) == 2, "the spans")
    assert [span.name for span in spans.spans] == [
        "POST /v1/completions",
        "GET /v1/responses/{response_id}",
    ]
    assert spans.spans[0].attributes["http.response.status_code"] == 400
    assert spans.spans[0].error is None


async def test_the_gateway_closes_the_export_when_it_stops(
    settings_for: Callable[..., GatewaySettings], spans: ListedSpans
) -> None:
    gateway = Gateway(settings_for(scheduler="127.0.0.1:1"))
    await gateway.start()
    await asyncio.wait_for(gateway.stop(), 10)
    assert spans.is_closed


async def test_a_log_record_outside_the_call_has_the_trace(
    stack: Stack, logged: list[structlog.typing.EventDict]
) -> None:
    ids = stack.encode("fox jumps")
    call = stack.inference.Generate(
        pb.GenerateRequest(text="The", request_id="r"), metadata=METADATA
    )
    submission = await stack.scheduler.submissions.get()
    stack.scheduler.accept(submission)
    # Its first token is missing.
    stack.scheduler.write(submission, 1, ids[1:])
    again = await stack.scheduler.serve_one(ids)
    assert again.trace_context == submission.trace_context
    await call
    [record] = [record for record in logged if record["event"] == "tokens are missing"]
    assert (record["request_id"], record["trace_id"]) == ("r", PARENT.trace_id_hex)
