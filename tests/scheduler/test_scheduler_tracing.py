"""The spans of requests in the scheduler: every phase, across preemptions, workers and leaders."""

from itertools import groupby, pairwise

import pytest
import structlog
from beam_requests import beam_worker, submit_search
from checking_worker import Broken, CheckingWorker
from listed_spans import ListedSpans
from scheduler_stack import Stack, check_outputs, prompt, running_stack
from waiting import until

from quire.internal.v1 import scheduler_pb2, worker_pb2
from quire.service.tracing.context import TraceContext
from quire.service.tracing.spans import EndedSpan
from scheduler_svc.settings import SchedulerSettings

PARENT = TraceContext(0xABC, 0xDEF, is_sampled=True, tracestate="a=b")


def header(context: TraceContext = PARENT) -> scheduler_pb2.TraceContext:
    return scheduler_pb2.TraceContext(
        traceparent=context.traceparent, tracestate=context.tracestate
    )


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> ListedSpans:
    listed = ListedSpans()
    monkeypatch.setattr(SchedulerSettings, "span_exporter", lambda settings, service: listed)
    return listed


def choice_of(span: EndedSpan) -> tuple[object, object]:
    return span.attributes["quire.request_id"], span.attributes.get("quire.choice", 0)


def check_tree(spans: ListedSpans, parent: TraceContext = PARENT) -> None:
    """Every span is a child of the request's, and those of a choice follow one another."""
    assert len({span.context.span_id for span in spans.spans}) == len(spans.spans)
    for span in spans.spans:
        assert span.parent == parent
        assert span.context.trace_id == parent.trace_id
        assert span.context.tracestate == parent.tracestate
        assert not span.is_server
    by_choice = sorted(spans.spans, key=lambda span: (str(choice_of(span)), span.end_ns))
    for _, found in groupby(by_choice, key=choice_of):
        for one, following in pairwise(found):
            assert one.start_ns <= one.end_ns == following.start_ns


async def test_a_request_is_queued_then_computes_its_prompt_then_decodes(redis_url, sockets, spans):
    async with running_stack(redis_url, sockets, {"a": CheckingWorker(1)}) as stack:
        gateway = await stack.gateway()
        await gateway.wait_ended(
            await gateway.submit(prompt(9), max_tokens=4, request_id="r", trace_context=header())
        )
        assert spans.names() == ["queue", "prefill", "decode"]
        check_tree(spans)
        worker = stack.only_lane.address
        assert spans.only("queue").attributes == {"quire.request_id": "r", "quire.output_tokens": 0}
        assert spans.only("prefill").attributes == {
            "quire.request_id": "r",
            "quire.worker": worker,
            "quire.cached_tokens": 0,
            "quire.uncached_tokens": 9,
            "quire.output_tokens": 1,
        }
        assert spans.only("decode").attributes == {
            "quire.request_id": "r",
            "quire.worker": worker,
            "quire.output_tokens": 4,
            "quire.finish_reason": "length",
        }
        # The lane looks for no sequence any more.
        assert not stack.only_lane.table.traced.in_prefill
    assert spans.is_closed


@pytest.mark.parametrize("is_traced", [True, False])
async def test_requests_that_are_not_sampled_have_no_spans(redis_url, sockets, spans, is_traced):
    fields = {"trace_context": header(TraceContext(1, 2, is_sampled=False))} if is_traced else {}
    async with running_stack(redis_url, sockets, {"a": CheckingWorker(1)}) as stack:
        gateway = await stack.gateway()
        attachment = await gateway.submit(prompt(9), max_tokens=4, **fields)
        await until(lambda: stack.engine.live, "the request")
        [group] = stack.engine.live.values()
        assert group.trace is None
        assert ("trace_id" in group.record.log_fields) == is_traced
        await gateway.wait_ended(attachment)
    assert spans.spans == []


async def test_every_choice_has_its_phases(redis_url, sockets, spans):
    async with running_stack(redis_url, sockets, {"a": CheckingWorker(1)}) as stack:
        gateway = await stack.gateway()
        await gateway.submit(prompt(9), max_tokens=5, n=3, trace_context=header())
        await check_outputs(gateway)
    assert spans.names(0) == ["queue", "prefill", "decode"]
    # The others are forked from the prompt.
    assert spans.names(1) == spans.names(2) == ["prefill", "decode"]
    check_tree(spans)


async def test_a_request_that_is_cancelled_ends_its_phase_with_the_reason(
    redis_url, sockets, spans
):
    worker = CheckingWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        attachment = await gateway.submit(prompt(9), max_tokens=50, trace_context=header())
        await until(lambda: len(gateway.received[attachment].token_ids) > 2, "tokens")
        await gateway.cancel(attachment)
        await until(lambda: "decode" in spans.names(), "the last span")
        decode = spans.only("decode")
        assert (decode.error, decode.attributes["error.type"]) == ("CANCELLED", "CANCELLED")
        await until(lambda: stack.only_lane.is_empty, "an empty lane")


async def test_a_request_continues_its_trace_after_its_worker_is_lost(redis_url, sockets, spans):
    worker = CheckingWorker(1)

    def lose(result: worker_pb2.StepResult) -> None:
        worker.distort = lambda result: None
        raise Broken

    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        attachment = await gateway.submit(prompt(9), max_tokens=30, trace_context=header())
        await until(lambda: len(gateway.received[attachment].token_ids) > 4, "tokens")
        address = stack.only_lane.address
        worker.distort = lose
        await check_outputs(gateway)
    assert spans.names() == ["queue", "prefill", "decode", "recovery", "prefill", "decode"]
    check_tree(spans)
    lost, before = spans.only("recovery"), spans.spans[2]
    assert lost.attributes["quire.cause"] == "worker lost"
    assert lost.attributes["quire.lost_worker"] == address
    assert "quire.finish_reason" not in before.attributes
    assert before.attributes["quire.output_tokens"] >= 4


@pytest.mark.parametrize(
    ("mode", "phase"), [("recompute", "preempted"), ("swap", "swapped")], ids=["recompute", "swap"]
)
async def test_preempted_requests_wait_in_phases_of_their_own(
    redis_url, sockets, spans, mode, phase
):
    # Two sequences of 32 tokens need 16 blocks.
    worker = CheckingWorker(1, num_blocks=14, max_model_len=32, num_host_blocks=32)
    async with running_stack(redis_url, sockets, {"a": worker}, preemption_mode=mode) as stack:
        gateway = await stack.gateway()
        for seed in range(2):
            await gateway.submit(prompt(8, seed), 24, seed, trace_context=header())
        await check_outputs(gateway)
    check_tree(spans)
    ended = [span for span in spans.spans if "quire.finish_reason" in span.attributes]
    assert [span.name for span in ended] == ["decode", "decode"]
    request_id = next(s.attributes["quire.request_id"] for s in spans.spans if s.name == phase)
    names = [s.name for s in spans.spans if s.attributes["quire.request_id"] == request_id]
    after = names[names.index(phase) + 1 :]
    assert after[0] == ("prefill" if mode == "recompute" else "decode")


async def test_a_search_has_the_phases_of_its_first_beam(redis_url, sockets, spans):
    async with running_stack(redis_url, sockets, {"a": beam_worker()}) as stack:
        gateway = await stack.gateway()
        await submit_search(gateway, prompt(9), max_tokens=6, trace_context=header())
        await check_outputs(gateway)
    assert spans.names() == ["queue", "prefill", "decode"]
    check_tree(spans)


async def killed(stack: Stack) -> None:
    previous, successor = stack.member, stack.start_scheduler()
    await until(lambda: successor.is_standby, "a standby")
    await previous.kill()
    stack.expire_lease(previous)


async def test_a_new_leader_continues_the_trace(redis_url, sockets, spans):
    worker = CheckingWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        attachment = await gateway.submit(prompt(9), max_tokens=40, trace_context=header())
        received = gateway.received[attachment]
        await until(lambda: len(received.token_ids) > 3, "tokens")
        worker.gate.clear()
        await killed(stack)
        # What the dead one had begun is lost with it, unless it had ended.
        num_before = len(spans.spans)
        worker.gate.set()
        gateway = await stack.gateway()
        # It has the context from Redis: this gateway does not send it again.
        [again] = await gateway.wait_ended(await gateway.attach_again(received))
        assert again.is_whole
    names = spans.names()[num_before:]
    assert names == ["recovery", "prefill", "decode"]
    assert spans.spans[num_before].attributes["quire.cause"] == "scheduler changed"
    assert {span.parent for span in spans.spans} == {PARENT}


async def test_a_failed_row_is_logged_with_the_trace(redis_url, sockets):
    """Also without an export of spans."""
    worker = CheckingWorker(1)
    worker.failing_seeds.add(3)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        with structlog.testing.capture_logs() as logged:
            attachment = await gateway.submit(
                prompt(9), seed=3, request_id="r", trace_context=header()
            )
            [received] = await gateway.wait_ended(attachment)
        assert received.failure is not None
    [record] = [record for record in logged if record["event"] == "row failed"]
    assert (record["request_id"], record["trace_id"]) == ("r", PARENT.trace_id_hex)
