"""W3C Trace Context: what a header means, and how traces begin."""

import pytest

from quire.service.tracing.context import TraceContext

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADER = f"00-{TRACE}-{SPAN}-01"
EXPECTED = TraceContext(int(TRACE, 16), int(SPAN, 16), is_sampled=True)


def test_a_header_is_read_and_written() -> None:
    context = TraceContext.parse(HEADER, "vendor=a, other=b")
    assert context == TraceContext(EXPECTED.trace_id, EXPECTED.span_id, True, "vendor=a, other=b")
    assert context.traceparent == HEADER
    assert context.trace_id_hex == TRACE


@pytest.mark.parametrize(
    ("header", "is_sampled"),
    [
        (f" {HEADER} ", True),
        (f"00-{TRACE}-{SPAN}-00", False),
        # Flags that are not known, with and without that of sampling.
        (f"00-{TRACE}-{SPAN}-03", True),
        (f"00-{TRACE}-{SPAN}-fe", False),
        # A later version may have more after another dash.
        (f"cc-{TRACE}-{SPAN}-01", True),
        (f"cc-{TRACE}-{SPAN}-01-what-the-future-brings", True),
    ],
)
def test_a_valid_header_has_the_flag_of_sampling(header: str, is_sampled: bool) -> None:
    context = TraceContext.parse(header)
    assert context is not None
    assert (context.trace_id, context.span_id) == (EXPECTED.trace_id, EXPECTED.span_id)
    assert context.is_sampled == is_sampled


@pytest.mark.parametrize(
    "header",
    [
        "",
        "x",
        HEADER[:-1],
        HEADER + "-more",
        HEADER + "0",
        HEADER.upper(),
        f"ff-{TRACE}-{SPAN}-01",
        f"cc-{TRACE}-{SPAN}-01.what",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-zz",
        f"00_{TRACE}_{SPAN}_01",
    ],
)
def test_an_invalid_header_is_none(header: str) -> None:
    assert TraceContext.parse(header) is None


@pytest.mark.parametrize("state", ["v=" + "x" * 511, "v=\n", "v=é"])
def test_a_state_that_cannot_be_sent_on_is_dropped(state: str) -> None:
    assert TraceContext.parse(HEADER, state) == EXPECTED


def test_a_child_is_another_span_of_the_trace() -> None:
    context = TraceContext.parse(HEADER, "a=b")
    assert context is not None
    child = context.child()
    assert (child.trace_id, child.is_sampled) == (context.trace_id, context.is_sampled)
    assert child.tracestate == "a=b"
    assert child.span_id not in (0, context.span_id)


@pytest.mark.parametrize(("ratio", "expected"), [(0.0, {False}), (1.0, {True})])
def test_no_trace_or_every_trace_is_sampled(ratio: float, expected: set[bool]) -> None:
    assert {TraceContext.begin(ratio).is_sampled for _ in range(50)} == expected


def test_the_sampled_share_follows_from_the_ids() -> None:
    for context in (TraceContext.begin(0.25) for _ in range(100)):
        assert context.is_sampled == ((context.trace_id & (2**64 - 1)) < 2**62)


@pytest.mark.parametrize("state", ["", "a=b", "a=b, c=d"])
def test_a_context_is_one_string(state: str) -> None:
    context = TraceContext(1, 2**64 - 1, False, state)
    assert TraceContext.unpack(context.pack()) == context
    assert TraceContext.unpack("") is None
