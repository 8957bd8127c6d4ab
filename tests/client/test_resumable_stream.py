"""Streams that break and go on, with both clients, against a real server."""

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
from breaking_gateway import (
    BROKEN,
    CANCELLED,
    DRAINING,
    NUM_TOKENS,
    REFUSED,
    RESET,
    SLOW,
    TAKEN_OVER,
    UNKNOWN,
    UNKNOWN_MODEL,
    Gateway,
    ScriptedCall,
)
from waiting import until

from quire import (
    AsyncClient,
    CancelledError,
    Client,
    DeadlineExceededError,
    Logprob,
    NotFoundError,
    QuireError,
    RequestDelta,
    SamplingParams,
    UnavailableError,
)
from quire.v1 import inference_pb2


@pytest.fixture
def gateways() -> Iterator:
    made: list[Gateway] = []

    def make(*script: ScriptedCall) -> Gateway:
        made.append(Gateway(*script))
        return made[-1]

    yield make
    for gateway in made:
        gateway.stop()


@pytest.fixture(params=["sync", "async"])
def stream(request):
    """Collect a stream of either client: the messages until it ends or raises."""

    def collect(target, n=1, resume_timeout_s=10.0, resume=None, **options) -> list[RequestDelta]:
        params = SamplingParams(n=n)
        if request.param == "sync":
            with Client(target, resume_timeout_s=resume_timeout_s) as client:
                if resume is not None:
                    return list(client.resume(*resume, **options))
                return list(client.stream_generate("hello", params, **options))

        async def ask() -> list[RequestDelta]:
            async with AsyncClient(target, resume_timeout_s=resume_timeout_s) as client:
                if resume is not None:
                    return [delta async for delta in client.resume(*resume, **options)]
                asked = client.stream_generate("hello", params, **options)
                return [delta async for delta in asked]

        return asyncio.run(ask())

    return collect


def check_whole(deltas: list[RequestDelta], n: int = 1) -> None:
    """One acceptance, every token once and in order, and with it how likely it was, every end
    once, one usage, last."""
    assert [bool(d.outputs or d.usage) for d in deltas].count(False) == 1
    assert deltas[0].outputs == []
    for index in range(n):
        parts = [o for d in deltas for o in d.outputs if o.index == index]
        assert "".join(o.text for o in parts) == "".join(f"{index}{i} " for i in range(NUM_TOKENS))
        token_ids = [token_id for o in parts for token_id in o.token_ids]
        assert token_ids == [100 * index + i for i in range(NUM_TOKENS)]
        assert [entry for o in parts for entry in o.logprobs] == [
            {100 * index + i: Logprob(-i, index + 1, f"{index}{i} ")} for i in range(NUM_TOKENS)
        ]
        assert [o.finish_reason for o in parts if o.finish_reason] == ["length"]
        assert parts[-1].finish_reason == "length"
    of_prompt = [d.prompt_logprobs for d in deltas if d.prompt_logprobs is not None]
    assert of_prompt == [[None, {5: Logprob(-2, 3, "five")}]]
    assert [d.usage.completion_tokens for d in deltas if d.usage] == [n * NUM_TOKENS]
    assert deltas[-1].usage


def test_an_undisturbed_stream_is_unchanged(gateways, stream):
    gateway = gateways()
    check_whole(stream(gateway.target, n=2), n=2)
    assert len(gateway.requests) == 1


def test_before_acceptance_the_same_request_is_sent_again(gateways, stream):
    gateway = gateways(ScriptedCall(BROKEN, after=0), ScriptedCall(DRAINING, after=0))
    check_whole(stream(gateway.target))
    assert gateway.resumed == []
    assert len(gateway.requests) == 3
    assert gateway.requests[0].request_id
    assert gateway.requests[0] == gateway.requests[2]


@pytest.mark.parametrize("error", [BROKEN, DRAINING, RESET, SLOW])
def test_a_stream_continues_after_the_received_tokens(gateways, stream, error):
    gateway = gateways(ScriptedCall(error, after=4))
    check_whole(stream(gateway.target))
    assert gateway.resumed == [[3]]


def test_an_accepted_stream_without_a_token_restarts(gateways, stream):
    gateway = gateways(ScriptedCall(BROKEN, after=1))
    check_whole(stream(gateway.target))
    assert gateway.resumed == [[]]


def test_each_of_several_choices_continues_independently(gateways, stream):
    gateway = gateways(ScriptedCall(BROKEN, after=4), ScriptedCall(BROKEN, after=2))
    check_whole(stream(gateway.target, n=3), n=3)
    assert gateway.resumed == [[3, 3, 3], [4, 4, 4]]


def test_a_choice_ends_once(gateways, stream):
    # All tokens and the first of three ends.
    gateway = gateways(ScriptedCall(BROKEN, after=NUM_TOKENS + 2))
    check_whole(stream(gateway.target, n=3), n=3)
    assert gateway.resumed == [[NUM_TOKENS] * 3]


def test_a_missing_usage_is_requested(gateways, stream):
    gateway = gateways(ScriptedCall(BROKEN, after=NUM_TOKENS + 2))
    check_whole(stream(gateway.target))
    assert gateway.resumed == [[NUM_TOKENS]]


def test_a_failure_after_the_usage_is_ignored(gateways, stream):
    gateway = gateways(ScriptedCall(BROKEN))
    check_whole(stream(gateway.target))
    assert len(gateway.requests) == 1


def test_repeated_tokens_are_dropped(gateways, stream):
    gateway = gateways(ScriptedCall(BROKEN, after=5), ScriptedCall(skew=-2))
    check_whole(stream(gateway.target, n=2), n=2)


def test_missing_tokens_are_requested_again(gateways, stream):
    gateway = gateways(ScriptedCall(BROKEN, after=4), ScriptedCall(skew=1))
    check_whole(stream(gateway.target))
    assert gateway.resumed == [[3], [3]]


def test_the_next_gateway_takes_over_and_stays_first(gateways):
    first, second = gateways(ScriptedCall(BROKEN, after=3)), gateways()
    with Client(f"{first.target}, {second.target}") as client:
        check_whole(list(client.stream_generate("hello")))
        assert client.current_target == second.target
        check_whole(list(client.stream_generate("hello")))
    assert (len(first.requests), second.resumed, len(second.requests)) == (1, [[2]], 2)


def test_an_absent_gateway_is_skipped(gateways, stream):
    gateway = gateways()
    check_whole(stream(f"127.0.0.1:1,{gateway.target}"))


def test_a_lost_request_without_tokens_restarts(gateways, stream):
    gateway = gateways(ScriptedCall(BROKEN, after=1), ScriptedCall(UNKNOWN, after=0))
    check_whole(stream(gateway.target))
    assert gateway.requests[2] == gateway.requests[0]


def test_a_request_that_ended_with_its_connection_restarts_without_tokens(gateways, stream):
    gateway = gateways(
        ScriptedCall(BROKEN, after=1),
        ScriptedCall(BROKEN, after=0),
        ScriptedCall(CANCELLED, after=0),
    )
    check_whole(stream(gateway.target))
    assert gateway.requests[3] == gateway.requests[0]


def test_a_lost_request_restarts_at_the_gateway_that_responded(gateways, stream):
    broken = gateways(*[ScriptedCall(BROKEN, after=1)] * 100)
    gateway = gateways(ScriptedCall(CANCELLED, after=0))
    check_whole(stream(f"{broken.target},{gateway.target}"))
    assert (len(broken.requests), len(gateway.requests)) == (1, 2)


@pytest.mark.parametrize("error", [RESET, SLOW])
def test_a_request_that_ended_with_its_connection_names_the_window(gateways, stream, error):
    gateway = gateways(ScriptedCall(error, after=4), ScriptedCall(CANCELLED, after=0))
    with pytest.raises(UnavailableError, match="resume_window_s") as caught:
        stream(gateway.target)
    assert not caught.value.resumable
    assert len(gateway.requests) == 2
    assert gateway.cancelled_ids == []


@pytest.mark.parametrize(
    ("script", "options"),
    [
        # With a window, after a gateway that stops, and after a message of a further attempt.
        ([ScriptedCall(BROKEN, after=1)], {"resume_window_s": 30}),
        ([ScriptedCall(DRAINING, after=1)], {}),
        ([ScriptedCall(BROKEN, after=0), ScriptedCall(CANCELLED, after=1)], {}),
    ],
)
def test_a_request_that_was_cancelled_by_its_id_is_no_lost_one(gateways, stream, script, options):
    gateway = gateways(*script, *[ScriptedCall(CANCELLED, after=0)] * 2)
    with pytest.raises(CancelledError, match="the request was cancelled"):
        stream(gateway.target, **options)
    assert len(gateway.requests) == 2


@pytest.mark.parametrize("error", [UNKNOWN, TAKEN_OVER, REFUSED])
def test_a_final_error_is_raised(gateways, stream, error):
    # A request that another client has resumed must not be taken from it.
    gateway = gateways(ScriptedCall(BROKEN, after=4), ScriptedCall(error, after=0))
    with pytest.raises(QuireError) as caught:
        stream(gateway.target)
    assert caught.value.code is error.code
    assert len(gateway.requests) == 2
    assert gateway.cancelled_ids == []


def test_without_retries_the_first_failure_is_raised(gateways, stream):
    gateway = gateways(ScriptedCall(DRAINING, after=4))
    with pytest.raises(QuireError) as caught:
        stream(gateway.target, resume_timeout_s=0)
    assert caught.value.resumable
    assert len(gateway.resumed) == 0


def test_without_a_server_the_resume_timeout_ends_the_call(stream):
    with pytest.raises(QuireError, match=r"no server responds at 127\.0\.0\.1:[12]"):
        stream("127.0.0.1:1,127.0.0.1:2", resume_timeout_s=0.2)


def test_a_deadline_includes_all_attempts(gateways, stream):
    gateway = gateways(ScriptedCall(BROKEN, after=4), ScriptedCall(hang=True, after=1))
    with pytest.raises(QuireError) as caught:
        stream(gateway.target, timeout_s=0.5)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    first, second = gateway.seconds_left
    assert second <= first


def test_a_deadline_between_attempts_ends_the_request(gateways, stream, monkeypatch):
    # The delay of the retry ends at the deadline: during an attempt the server itself would see it.
    monkeypatch.setattr("quire.client.retry_policy._FIRST_BACKOFF_S", 60.0)
    gateway = gateways(ScriptedCall(BROKEN, after=0))
    with pytest.raises(DeadlineExceededError) as caught:
        stream(gateway.target, timeout_s=1.0, request_id="mine")
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert gateway.cancelled_ids == ["mine"]


def test_a_restarted_program_resumes(gateways, stream):
    gateway = gateways(ScriptedCall(BROKEN, after=2))
    deltas = stream(gateway.target, resume=("mine", [4, 2]))
    tokens = {i: [t for d in deltas for o in d.outputs if o.index == i for t in o.token_ids]
              for i in (0, 1)}  # fmt: skip
    assert tokens == {0: [4, 5], 1: [102, 103, 104, 105]}
    assert gateway.resumed == [[4, 2], [4, 3]]
    assert {ask.request_id for ask in gateway.requests} == {"mine"}


def test_an_unknown_model_is_no_lost_request(gateways, stream):
    """Both are NOT_FOUND."""
    gateway = gateways(ScriptedCall(UNKNOWN_MODEL, after=0))
    with pytest.raises(NotFoundError, match="no model"):
        stream(gateway.target)
    assert len(gateway.requests) == 1


def test_resuming_an_unknown_request_fails(gateways, stream):
    gateway = gateways(ScriptedCall(UNKNOWN, after=0))
    with pytest.raises(QuireError, match="NOT_FOUND") as caught:
        stream(gateway.target, resume=("mine",))
    assert not caught.value.resumable


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None,), r"request_id: must be a text"),
        (("mine", [-1]), r"next_token_indices\[0\]: must not be negative"),
        (("mine", "ab"), r"next_token_indices: must be a list"),
    ],
)
def test_invalid_arguments_of_resume_are_refused(gateways, stream, arguments, message):
    gateway = gateways()
    with pytest.raises((TypeError, ValueError), match=message):
        stream(gateway.target, resume=arguments)
    assert gateway.requests == []


def test_an_abandoned_stream_cancels_the_request_by_its_id(gateways):
    gateway = gateways(ScriptedCall(BROKEN, after=4))
    with Client(gateway.target, resume_timeout_s=0.3) as client:
        deltas = client.stream_generate("hello", request_id="mine")
        for _ in range(4):
            next(deltas)
        gateway.script.extend([ScriptedCall(BROKEN, after=0)] * 1000)
        with pytest.raises(QuireError):
            next(deltas)
    assert gateway.cancelled_ids == ["mine"]


def test_on_break_is_called_with_each_failure(gateways):
    gateway = gateways(ScriptedCall(DRAINING, after=0), ScriptedCall(BROKEN, after=3))
    breaks: list[QuireError] = []
    with Client(gateway.target, on_break=breaks.append) as client:
        check_whole(list(client.stream_generate("hello")))
    assert [error.reason for error in breaks] == ["DRAINING", None]


@pytest.mark.parametrize(("window", "cancelled"), [(None, ["mine"]), (60, [])])
async def test_cancelling_the_task_between_two_calls_ends_the_request(gateways, window, cancelled):
    gateway = gateways(ScriptedCall(BROKEN, after=4), *[ScriptedCall(BROKEN, after=0)] * 1000)
    async with AsyncClient(gateway.target) as client:

        async def listen() -> None:
            asked = client.stream_generate("hello", request_id="mine", resume_window_s=window)
            async for _ in asked:
                pass

        task = asyncio.create_task(listen())
        await until(lambda: len(gateway.resumed) >= 2, "the second try")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert gateway.cancelled_ids == cancelled


@pytest.mark.parametrize("error", [BROKEN, DRAINING])
async def test_a_unary_request_is_repeated_with_its_id(gateways, error):
    gateway = gateways(ScriptedCall(error), ScriptedCall(error))
    with Client(gateway.target) as client:
        output = await asyncio.to_thread(client.generate, "hello")
    assert output.usage.completion_tokens == NUM_TOKENS
    gateway.script.extend([ScriptedCall(error)])
    async with AsyncClient(gateway.target) as client:
        await client.generate("hello", resume_window_s=5)
    first, second, third, *later = gateway.requests
    assert first == second == third
    assert len(later) == 2
    assert later[0] == later[1]
    assert later[0].request_id not in ("", first.request_id)
    assert later[0].resume_window_s == 5


@pytest.fixture(params=["sync", "async"])
def cancel(request):
    """Cancel a request by either client."""

    def call(target: str, request_id: str) -> None:
        if request.param == "sync":
            with Client(target) as client:
                client.cancel(request_id)
            return

        async def ask() -> None:
            async with AsyncClient(target) as client:
                await client.cancel(request_id)

        asyncio.run(ask())

    return call


def test_a_repeated_cancellation_does_not_miss_the_request_that_it_has_ended(gateways, cancel):
    gateway = gateways()
    gateway.cancel_script = [ScriptedCall(BROKEN), ScriptedCall(UNKNOWN)]
    cancel(gateway.target, "mine")
    assert gateway.cancelled_ids == ["mine", "mine"]


def test_an_unknown_request_cannot_be_cancelled(gateways, cancel):
    gateway = gateways()
    for target in (gateway.target, f"127.0.0.1:1,{gateway.target}"):
        gateway.cancel_script = [ScriptedCall(UNKNOWN)]
        with pytest.raises(NotFoundError, match="not known"):
            cancel(target, "mine")
    assert gateway.cancelled_ids == ["mine", "mine"]


def test_concurrent_calls_are_retried_independently(gateways):
    gateway = gateways(*[ScriptedCall(BROKEN), ScriptedCall()] * 10)
    with Client(gateway.target) as client:
        outputs = client.generate_all([f"prompt {i}" for i in range(20)], [None] * 20)
    assert [output.prompt for output in outputs] == [f"prompt {i}" for i in range(20)]
    assert len(gateway.requests) == 30
    assert len({ask.request_id for ask in gateway.requests}) == 20


def test_a_unary_request_has_one_deadline(gateways):
    gateway = gateways(*[ScriptedCall(BROKEN)] * 100)
    with Client(gateway.target) as client, pytest.raises(DeadlineExceededError) as caught:
        client.generate("hello", timeout_s=0.3)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


def test_a_request_may_have_a_window(gateways, stream):
    gateway = gateways()
    stream(gateway.target, resume_window_s=7)
    assert gateway.requests[0].resume_window_s == 7
    with pytest.raises(TypeError, match="resume_window_s: must be an integer"):
        stream(gateway.target, resume_window_s=1.5)


@pytest.mark.parametrize("value", [-1, float("nan"), "5"])
@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_an_invalid_resume_timeout_is_refused(kind, value):
    with pytest.raises((TypeError, ValueError), match="resume_timeout_s: must be"):
        kind("127.0.0.1:1", resume_timeout_s=value)


def test_a_server_that_accepts_connections_but_does_not_respond_is_skipped(gateways, stream):
    """The kernel accepts connections for a stopped process."""
    gateway = gateways()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        target = f"127.0.0.1:{silent.getsockname()[1]},{gateway.target}"
        check_whole(stream(target))


_GATEWAY = """
import os, sys
sys.path[:0] = sys.argv[1:]
from breaking_gateway import Gateway, ScriptedCall
gateway = Gateway(ScriptedCall(after=4, hang=True))
print(gateway.target, os.getpid(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def distant_gateway() -> Iterator[subprocess.Popen]:
    """A gateway in a separate process, which sends four messages and then hangs."""
    here = Path(__file__).parent
    command = [sys.executable, "-c", _GATEWAY, str(here), str(here.parent / "support")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize("signal_name", ["SIGSTOP", "SIGKILL"])
async def test_a_gateway_that_hangs_during_a_stream_is_detected(
    gateways, distant_gateway, signal_name
):
    target = distant_gateway.stdout.readline().split()[0]
    gateway = gateways()
    async with AsyncClient(f"{target},{gateway.target}") as client:
        deltas: list[RequestDelta] = []
        async for delta in client.stream_generate("hello", timeout_s=30):
            deltas.append(delta)
            if len(deltas) == 4:
                distant_gateway.send_signal(getattr(signal, signal_name))
    check_whole(deltas)
    assert gateway.resumed == [[3]]


@pytest.mark.slow
async def test_an_idle_call_is_not_treated_as_dead(gateways):
    """Servers permit the rate of pings that clients use."""
    gateway = gateways(ScriptedCall(after=2, hang=True))
    async with AsyncClient(gateway.target) as client:
        deltas: AsyncIterator = client.stream_generate("hello")
        await anext(deltas)
        await anext(deltas)
        waiting = asyncio.ensure_future(anext(deltas))
        await asyncio.wait({waiting}, timeout=5)
        assert not waiting.done()
        waiting.cancel()
    assert len(gateway.requests) == 1
    assert isinstance(gateway.requests[0], inference_pb2.StreamGenerateRequest)
