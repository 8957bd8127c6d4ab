"""How many calls are in progress at once. The calls are scripted."""

import asyncio
import queue
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from quire.client import concurrent_calls
from quire.client.concurrent_calls import AioCallLimit, ConcurrentCalls, run_each_aio
from quire.client.errors import UnavailableError
from quire.client.retry_policy import RetryPolicy
from quire.client.targets import Targets


class Failure(grpc.RpcError):
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "ping timeout"

    def trailing_metadata(self) -> tuple[()]:
        return ()


class Server:
    """Ends calls when as many are in progress as it waits for; the first ones fail."""

    def __init__(self, num_failing: int) -> None:
        # How many calls were in progress each time.
        self.waves: list[int] = []
        self._num_failing = num_failing
        self._running: list[Call] = []

    def future(self, request: int, **_: object) -> "Call":
        call = Call(request)
        self._running.append(call)
        return call

    def end_all(self) -> None:
        ended, self._running = self._running, []
        self.waves.append(len(ended))
        for call in ended:
            call.fails = self._num_failing > 0
            self._num_failing = max(0, self._num_failing - 1)
            call.on_end(call)


class Call:
    def __init__(self, request: int) -> None:
        self.on_end: Callable[[Any], object] = lambda _: None
        self.fails = False
        self._request = request

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        self.on_end = callback

    def result(self) -> int:
        if self.fails:
            raise Failure
        return self._request

    def cancel(self) -> None:
        pass


class Ended(queue.SimpleQueue[int]):
    """Ends the calls in progress when all that have ended are read: all that may start have."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def get(self, block: bool = True, timeout: float | None = None) -> int:
        if self.empty():
            self._server.end_all()
        return super().get(block, timeout)


@pytest.mark.parametrize(
    ("num_failing", "expected"),
    [
        (0, [8, 8, 8, 8, 8]),
        # The limit rises by one with each success of a call that began after it fell.
        (1, [8, 4, 8, 8, 8, 5]),
        (8, [8, 4, 8, 8, 8, 8, 4]),
        (12, [8, 4, 2, 4, 8, 8, 8, 8, 2]),
    ],
)
def test_calls_that_fail_together_halve_the_number_at_once(
    monkeypatch: pytest.MonkeyPatch, num_failing: int, expected: list[int]
) -> None:
    monkeypatch.setattr(concurrent_calls, "MAX_CALLS", 8)
    monkeypatch.setattr(concurrent_calls, "_MIN_CALLS", 2)
    server = Server(num_failing)
    policies = [RetryPolicy(Targets("a:1"), 30, jitter=lambda: -1.0) for _ in range(40)]
    calls = ConcurrentCalls[int, int](
        lambda target: server,  # type: ignore[arg-type,return-value]
        range(40),
        policies,
        (),
    )
    monkeypatch.setattr(calls, "_ended", Ended(server))
    assert calls.run() == list(range(40))
    assert server.waves == expected


def test_a_call_and_its_response_are_dropped_when_its_result_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(concurrent_calls, "MAX_CALLS", 2)
    server, begun = Server(1), weakref.WeakSet[Call]()

    def future(request: int, **_: object) -> Call:
        begun.add(call := server.future(request))
        return call

    calls = ConcurrentCalls[int, int](
        lambda target: SimpleNamespace(future=future),  # type: ignore[arg-type,return-value]
        range(10),
        [RetryPolicy(Targets("a:1"), 30, jitter=lambda: -1.0) for _ in range(10)],
        (),
    )
    monkeypatch.setattr(calls, "_ended", Ended(server))
    most = 0

    def take(*_: object) -> None:
        nonlocal most
        most = max(most, len(begun))

    calls.run_each(take)
    assert most <= 2


@pytest.mark.parametrize(("num_failing", "expected"), [(0, 8), (1, 4), (8, 4), (12, 2)])
async def test_calls_of_asyncio_that_fail_together_halve_their_number_too(
    monkeypatch: pytest.MonkeyPatch, num_failing: int, expected: int
) -> None:
    monkeypatch.setattr(concurrent_calls, "MAX_CALLS", 8)
    monkeypatch.setattr(concurrent_calls, "_MIN_CALLS", 2)
    running, most, after_failures, failures = 0, 0, 0, num_failing

    async def call(request: int, limit: AioCallLimit) -> int:
        nonlocal running, most, after_failures, failures
        while True:
            async with limit.attempt() as halvings_before:
                running += 1
                most = max(most, running)
                if not failures:
                    after_failures = max(after_failures, running)
                # All that may begin do.
                for _ in range(20):
                    await asyncio.sleep(0)
                running -= 1
                if not failures:
                    return request
                failures -= 1
                limit.halve(halvings_before)

    results: dict[int, object] = {}
    await run_each_aio(call, range(40), results.__setitem__)
    assert results == {index: index for index in range(40)}
    assert most == 8
    assert after_failures == expected


@pytest.mark.parametrize(
    ("num_failing", "expected"),
    [(0, [8] * 5), (1, [8, 4, 8, 8, 8, 5]), (12, [8, 4, 2, 4, 8, 8, 8, 8, 2])],
)
async def test_successes_of_calls_of_asyncio_raise_their_number_again(
    monkeypatch: pytest.MonkeyPatch, num_failing: int, expected: list[int]
) -> None:
    monkeypatch.setattr(concurrent_calls, "MAX_CALLS", 8)
    monkeypatch.setattr(concurrent_calls, "_MIN_CALLS", 2)
    server = Server(num_failing)
    begun = asyncio.Event()

    async def fails(request: int) -> bool:
        ended = asyncio.get_running_loop().create_future()
        server.future(request).add_done_callback(lambda call: ended.set_result(call.fails))
        begun.set()
        return bool(await ended)

    async def call(request: int, limit: AioCallLimit) -> int:
        while True:
            async with limit.attempt() as halvings_before:
                if not await fails(request):
                    limit.grow(halvings_before)
                    return request
                limit.halve(halvings_before)

    async def end_waves() -> None:
        for _ in expected:
            await begun.wait()
            # All that may begin do.
            for _ in range(20):
                await asyncio.sleep(0)
            begun.clear()
            server.end_all()

    results: dict[int, object] = {}
    ends = asyncio.create_task(end_waves())
    async with asyncio.timeout(10):
        await run_each_aio(call, range(40), results.__setitem__)
        await ends
    assert results == {index: index for index in range(40)}
    assert server.waves == expected


async def test_a_failure_that_is_not_taken_cancels_the_other_calls() -> None:
    cancelled = 0

    async def call(request: int, _: AioCallLimit) -> int:
        nonlocal cancelled
        if request == 3:
            raise UnavailableError(grpc.StatusCode.UNAVAILABLE, "broken")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled += 1
            raise
        return request

    def take(index: int, result: object) -> None:
        if isinstance(result, Exception):
            raise result

    with pytest.raises(UnavailableError, match="broken"):
        await run_each_aio(call, range(6), take)
    assert cancelled == 5
