"""Loads on servers that are scripted, in this process."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager

import pytest

from quire.bench.lengths import lengths
from quire.bench.load import Listener, run_load
from quire.bench.objectives import Objectives
from quire.bench.run import Load, run
from quire.bench.server import Message, RequestFailed
from quire.bench.workload import BenchRequest, Workload


class ScriptedServer:
    """Writes a token per message; a prompt that begins with 0 fails after its first, one that
    begins with 1 waits until the server is opened."""

    def __init__(self, name: str = "scripted", first_token_id: int = 100) -> None:
        self.name = name
        self.opened = asyncio.Event()
        self.requests: list[BenchRequest] = []
        self.num_running = 0
        self.most_running = 0
        self._first_token_id = first_token_id

    async def stream(self, request: BenchRequest) -> AsyncGenerator[Message, None]:
        self.requests.append(request)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            # The first message of a stream has no token yet.
            yield Message(0)
            if request.prompt_token_ids[0] == 1:
                await self.opened.wait()
            for at in range(request.max_tokens):
                await asyncio.sleep(0)
                yield Message(1, [self._first_token_id + at])
                if request.prompt_token_ids[0] == 0:
                    raise RequestFailed("as told")
            yield Message(0, num_counted_tokens=request.max_tokens)
        finally:
            self.num_running -= 1

    async def close(self) -> None:
        pass


@pytest.fixture
async def server() -> ScriptedServer:
    return ScriptedServer()


def load(**changes) -> Load:
    values = {
        "workload": Workload(
            num_requests=6,
            prompt_lengths=lengths("4"),
            output_lengths=lengths("2-5"),
            token_ids=range(2, 9),
        ),
        "rate_per_s": float("inf"),
        "arrival": "poisson",
        "max_concurrency": None,
        "num_warmups": 0,
        "objectives": Objectives(),
        **changes,
    }
    return Load(**values)


@contextmanager
def unwatched(_server: str, _num_requests: int) -> Iterator[Listener]:
    yield lambda _: None


async def test_traces_say_what_came_in_the_order_of_the_requests(server):
    requests = [BenchRequest([2], 3), BenchRequest([2], 1)]
    first, second = await run_load(server, requests, [0.0, 0.0])
    assert (first.counts, first.token_ids) == ([1, 1, 1], [100, 101, 102])
    assert (second.num_output_tokens, second.num_prompt_tokens) == (1, 1)
    assert first.times_s == sorted(first.times_s)
    assert 0 <= first.sent_s <= first.times_s[0] <= first.times_s[-1] <= first.ended_s


async def test_a_request_is_sent_when_it_is_due_whether_or_not_others_have_ended(server):
    """The first one hangs until the second has been there."""
    seen: list[int] = []

    def listen(trace) -> None:
        seen.append(trace.num_prompt_tokens)
        server.opened.set()

    requests = [BenchRequest([1], 1), BenchRequest([2, 2], 1)]
    first, second = await run_load(server, requests, [0.0, 0.02], on_change=listen)
    assert second.sent_s >= 0.02
    assert second.late_s < first.times_s[0]
    assert seen[0] == 2


async def test_a_failure_is_noted_and_the_others_go_on(server):
    requests = [BenchRequest([0], 4), BenchRequest([2], 4)]
    failed, done = await run_load(server, requests, [0.0, 0.0])
    assert (failed.error, failed.counts) == ("as told", [1])
    assert done.is_complete


async def test_no_more_are_under_way_than_places(server):
    requests = [BenchRequest([2], 3)] * 9
    traces = await run_load(server, requests, [0.0] * 9, max_concurrency=2)
    assert server.most_running == 2
    # They were due when they got their places.
    assert all(trace.late_s == 0 for trace in traces)
    assert traces[-1].due_s > 0


async def test_a_listener_hears_of_every_message_and_every_end(server):
    heard = []
    await run_load(
        server, [BenchRequest([2], 3)], [0.0], on_change=lambda t: heard.append(bool(t.ended_s))
    )
    assert heard == [False, False, False, True]


async def test_several_servers_get_the_same_and_are_compared(server):
    other = ScriptedServer("other")
    outcome = await run(load(), [server, other], unwatched)
    assert server.requests == other.requests
    assert [report.server for report in outcome.reports] == ["scripted", "other"]
    assert outcome.equality is not None
    assert outcome.equality.tokens == 1.0
    third = ScriptedServer("third", first_token_id=7)
    outcome = await run(load(), [server, third], unwatched)
    assert outcome.equality is not None
    assert outcome.equality.tokens == 0.0


async def test_a_single_server_is_equal_to_nobody(server):
    assert (await run(load(), [server], unwatched)).equality is None


async def test_warm_ups_come_first_do_not_count_and_are_other_prompts(server):
    outcome = await run(load(num_warmups=2), [server], unwatched)
    measured = load().workload.requests()
    assert server.requests[2:] == measured
    assert server.requests[0].prompt_token_ids == measured[0].prompt_token_ids[::-1]
    assert outcome.reports[0].num_requests == 6


async def test_a_server_that_fails_the_warm_up_is_not_measured(server):
    failing = Workload(
        num_requests=1,
        prompt_lengths=lengths("1"),
        output_lengths=lengths("1"),
        token_ids=range(1),
    )
    with pytest.raises(RequestFailed, match="scripted: as told"):
        await run(load(workload=failing, num_warmups=1), [server], unwatched)
