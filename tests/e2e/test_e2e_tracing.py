"""The trace of a request through a whole stack, across a worker's death and a lost receiver."""

import asyncio

import httpx2
import pytest
from otlp_receiver import OtlpReceiver, ReceivedSpan, otlp_receiver
from waiting import until

from quire import AsyncClient, SamplingParams
from quire.client.operations import Operations
from quire.launcher.stack import LocalStack

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CLIENT_SPAN = "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE_ID}-{CLIENT_SPAN}-01"}
NUM_TOKENS = 150
BODY = {"prompt": [5] * 40, "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}


def settings(receiver: OtlpReceiver) -> dict[str, str]:
    return {
        "QUIRE_WORKER_ENGINE": "sim",
        "QUIRE_WORKER_SIM_STEP_MS": "10",
        "QUIRE_GATEWAY_OTLP_TRACES_ENDPOINT": receiver.endpoint,
        "QUIRE_SCHEDULER_OTLP_TRACES_ENDPOINT": receiver.endpoint,
        "OTEL_BSP_SCHEDULE_DELAY": "100",
    }


def busy_worker(stack: LocalStack) -> str:
    """The address of the worker that runs a sequence; empty if none does."""
    with Operations(stack.scheduler_address) as operations:
        workers = operations.status(False, timeout_s=10).workers
    return next((worker.address for worker in workers if worker.num_running), "")


async def stream_and_kill(stack: LocalStack) -> str:
    """Run a request over HTTP, and kill its worker midway; return the worker's address."""
    killed, num_events, last = "", 0, ""
    async with (
        httpx2.AsyncClient(base_url=f"http://{stack.http_addresses[0]}", timeout=60) as client,
        client.stream("POST", "/v1/completions", json=BODY, headers=HEADERS) as response,
    ):
        assert response.status_code == 200
        async for line in response.aiter_lines():
            num_events += line.startswith("data: {")
            last = line or last
            if num_events > 20 and not killed:
                killed = await asyncio.to_thread(busy_worker, stack)
                [worker] = [one for one in stack.processes("worker") if one.address == killed]
                worker.kill()
    assert last == "data: [DONE]"
    return killed


def check_tree(spans: list[ReceivedSpan], lost_worker: str) -> None:
    [server] = [span for span in spans if span.service == "quire-gateway"]
    phases = [span for span in spans if span.service == "quire-scheduler"]
    assert (server.name, server.parent_span_id) == ("POST /v1/completions", CLIENT_SPAN)
    assert server.events == ("first token",)
    assert server.attributes["gen_ai.usage.output_tokens"] == NUM_TOKENS
    assert server.attributes["gen_ai.response.finish_reasons"] == ["length"]
    names = ["queue", "prefill", "decode", "recovery", "prefill", "decode"]
    assert [span.name for span in phases] == names
    assert {span.parent_span_id for span in phases} == {server.span_id}
    recovery, decode = phases[3], phases[5]
    assert recovery.attributes["quire.lost_worker"] == phases[2].attributes["quire.worker"]
    assert recovery.attributes["quire.lost_worker"] == lost_worker
    assert decode.attributes["quire.worker"] != lost_worker
    assert decode.attributes["quire.output_tokens"] == NUM_TOKENS
    assert server.start_ns <= phases[0].start_ns <= phases[-1].end_ns <= server.end_ns


@pytest.mark.slow
async def test_a_trace_is_one_tree_across_the_death_of_a_worker() -> None:
    with otlp_receiver() as receiver:
        stack = LocalStack(
            "demo/model", num_workers=2, http_listen="127.0.0.1:0", settings=settings(receiver)
        )
        with stack:
            lost_worker = await stream_and_kill(stack)
            await until(lambda: len(receiver.of_trace(TRACE_ID)) >= 7, "all spans", timeout_s=30)
            check_tree(receiver.of_trace(TRACE_ID), lost_worker)
            receiver.stop()
            # Without a receiver requests are served as before, and the stack ends as before.
            async with AsyncClient(stack.address) as client:
                params = SamplingParams(max_tokens=4, ignore_eos=True)
                for _ in range(3):
                    output = await client.generate([7] * 9, params)
                    assert len(output.outputs[0].token_ids) == 4
