"""The export of spans over OTLP: what a receiver gets, and what happens without one."""

import asyncio
from pathlib import Path

import pytest
from otlp_receiver import otlp_receiver
from pydantic_settings import SettingsConfigDict

from quire.service.tracing import settings
from quire.service.tracing.context import TraceContext
from quire.service.tracing.settings import TracedServiceSettings, endpoint_variable
from quire.service.tracing.spans import EndedSpan, SpanEvent

SECOND = 10**9


class ExampleSettings(TracedServiceSettings):
    model_config = SettingsConfigDict(env_prefix="QUIRE_EXAMPLE_", cli_prog_name="quire-example")


def span(context: TraceContext, parent: TraceContext | None, name: str = "decode") -> EndedSpan:
    return EndedSpan(
        name,
        context,
        parent,
        start_ns=5 * SECOND,
        end_ns=7 * SECOND,
        attributes={"quire.worker": "a:1", "count": 3, "reasons": ["stop", "length"]},
        events=[SpanEvent("first token", 6 * SECOND)],
        error="INTERNAL",
        is_server=parent is None,
    )


async def test_a_receiver_gets_spans_with_their_own_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=secret")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    root = TraceContext.begin(1.0)
    child = root.child()
    with otlp_receiver() as receiver:
        exporter = ExampleSettings(otlp_traces_endpoint=receiver.endpoint).span_exporter("example")
        assert exporter is not None
        exporter.export(span(child, root))
        exporter.export(span(root, None, "server"))
        await exporter.close()
    received = receiver.spans[0]
    assert (received.name, received.service) == ("decode", "quire-example")
    assert received.trace_id == root.trace_id_hex
    assert received.span_id == f"{child.span_id:016x}"
    assert received.parent_span_id == f"{root.span_id:016x}"
    assert (received.start_ns, received.end_ns) == (5 * SECOND, 7 * SECOND)
    assert received.attributes["reasons"] == ["stop", "length"]
    assert received.attributes["count"] == 3
    assert received.events == ("first token",)
    assert received.status == 2
    assert receiver.spans[1].span_id == f"{root.span_id:016x}"
    assert receiver.spans[1].parent_span_id == ""
    assert receiver.metadata[0]["api-key"] == "secret"


async def test_an_absent_receiver_delays_neither_spans_nor_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("quire.service.tracing.otlp.CLOSE_S", 0.1)
    # A queue that is soon full.
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    exporter = ExampleSettings(otlp_traces_endpoint="http://127.0.0.1:1").span_exporter("example")
    assert exporter is not None
    root = TraceContext.begin(1.0)
    for _ in range(100):
        exporter.export(span(root, None))
    # Without a bound the SDK waits for as long as an export may take: 10 s.
    async with asyncio.timeout(5):
        await exporter.close()


def test_traces_are_off_without_an_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not ExampleSettings().exports_traces
    assert ExampleSettings().span_exporter("example") is None
    assert ExampleSettings(otlp_traces_endpoint="").otlp_traces_endpoint is None


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4317"}, "OTEL_EXPORTER_OTLP_ENDPOINT"),
        (
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4317",
                "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://b:4317",
            },
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
        ),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1", "OTEL_SDK_DISABLED": "true"}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1", "OTEL_TRACES_EXPORTER": "none"}, None),
        (
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4318",
                "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            },
            None,
        ),
        (
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4318",
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc",
                "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            },
            "OTEL_EXPORTER_OTLP_ENDPOINT",
        ),
    ],
)
def test_the_standard_variables_name_the_receiver(
    variables: dict[str, str], expected: str | None
) -> None:
    assert endpoint_variable(variables) == expected


@pytest.mark.parametrize(
    "endpoint",
    [
        "collector:4317",
        "grpc://a:1",
        "http://",
        "http://a:1/path",
        "http://a:99999",
        "http://[::1:1",
    ],
)
def test_an_endpoint_that_is_no_url_stops_the_process(
    endpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        ExampleSettings.load([f"--otlp-traces-endpoint={endpoint}"])
    message = capsys.readouterr().err
    assert "--otlp-traces-endpoint / QUIRE_EXAMPLE_OTLP_TRACES_ENDPOINT: must be http" in message


def test_tracing_without_its_packages_stops_the_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(settings, "PACKAGES", ("no_such_package.sdk",))
    ExampleSettings.load([])
    for flags, variable in (
        (["--otlp-traces-endpoint=http://a:4317"], None),
        ([], "OTEL_EXPORTER_OTLP_ENDPOINT"),
    ):
        if variable is not None:
            monkeypatch.setenv(variable, "http://a:4317")
        with pytest.raises(SystemExit) as stopped:
            ExampleSettings.load(flags)
        assert stopped.value.code == 2
        message = capsys.readouterr().err
        assert (variable or "--otlp-traces-endpoint") in message
        assert "pip install 'quire[tracing]'" in message


def test_a_variable_that_the_sdk_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "soon")
    with pytest.raises(OSError, match=r"cannot export traces: .*soon"):
        ExampleSettings(otlp_traces_endpoint="http://a:4317").span_exporter("example")
