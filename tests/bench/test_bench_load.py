"""Loads on scripted servers in this process."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager

import pytest

from quire.bench.lengths import lengths
from quire.bench.load import Listener, run_load
from quire.bench.objectives import ServiceLevelObjectives
from quire.bench.run import LoadSpec, run
from quire.bench.server import Message, RequestFailed
from quire.bench.workload import BenchRequest, Workload
from quire.client.decode_counts import DecodeCounts


class ScriptedServer:
    """Streams a token per message. A prompt that begins with 0 fails after its first token; one
    that begins with 1 waits until the server is opened."""

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
                    raise RequestFailed("scripted failure")
            yield Message(0, num_counted_tokens=request.max_tokens)
        finally:
            self.num_running -= 1

    async def decode_counts(self) -> DecodeCounts:
        """A row gains a token per step, and one more per request, by an accepted draft of two."""
        num_tokens = sum(request.max_tokens for request in self.requests)
        count = len(self.requests)
        return DecodeCounts(num_tokens, num_tokens - count, (count, count), (count,))

    async def close(self) -> None:
        pass


@pytest.fixture
async def server() -> ScriptedServer:
    return ScriptedServer()


def load(**changes) -> LoadSpec:
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
        "objectives": ServiceLevelObjectives(),
        **changes,
    }
    return LoadSpec(**values)


@contextmanager
def unwatched(_server: str, _num_requests: int) -> Iterator[Listener]:
    yield lambda _: None


async def test_traces_are_in_the_order_of_the_requests(server):
    requests = [BenchRequest([2], 3), BenchRequest([2], 1)]
    first, second = await run_load(server, requests, [0.0, 0.0])
    assert (first.counts, first.token_ids) == ([1, 1, 1], [100, 101, 102])
    assert (second.num_output_tokens, second.num_prompt_tokens) == (1, 1)
    assert first.times_s == sorted(first.times_s)
    assert 0 <= first.sent_s <= first.times_s[0] <= first.times_s[-1] <= first.ended_s


async def test_a_request_is_sent_at_its_arrival_even_if_earlier_ones_run(server):
    """The first request hangs until the second has had a token."""
    seen: list[int] = []

    def listen(timings) -> None:
        seen.append(timings.num_prompt_tokens)
        server.opened.set()

    requests = [BenchRequest([1], 1), BenchRequest([2, 2], 1)]
    first, second = await run_load(server, requests, [0.0, 0.02], on_change=listen)
    assert second.sent_s >= 0.02
    assert second.late_s < first.times_s[0]
    assert seen[0] == 2


async def test_a_failure_is_recorded_and_other_requests_continue(server):
    requests = [BenchRequest([0], 4), BenchRequest([2], 4)]
    failed, done = await run_load(server, requests, [0.0, 0.0])
    assert (failed.error, failed.counts) == ("scripted failure", [1])
    assert done.is_complete


async def test_max_concurrency_limits_the_requests_in_flight(server):
    requests = [BenchRequest([2], 3)] * 9
    timings = await run_load(server, requests, [0.0] * 9, max_concurrency=2)
    assert server.most_running == 2
    # Their arrival is the time of sending.
    assert all(request.late_s == 0 for request in timings)
    assert timings[-1].due_s > 0


async def test_a_listener_is_called_for_every_message_and_every_end(server):
    calls = []
    await run_load(
        server, [BenchRequest([2], 3)], [0.0], on_change=lambda t: calls.append(bool(t.ended_s))
    )
    assert calls == [False, False, False, True]


async def test_several_servers_receive_equal_requests_and_are_compared(server):
    other = ScriptedServer("other")
    result = await run(load(), [server, other], unwatched)
    assert server.requests == other.requests
    assert [report.server for report in result.reports] == ["scripted", "other"]
    assert result.equality is not None
    assert result.equality.tokens == 1.0
    third = ScriptedServer("third", first_token_id=7)
    result = await run(load(), [server, third], unwatched)
    assert result.equality is not None
    assert result.equality.tokens == 0.0


async def test_a_single_server_has_no_equality(server):
    assert (await run(load(), [server], unwatched)).equality is None


async def test_warm_ups_are_first_not_counted_and_have_other_prompts(server):
    result = await run(load(num_warmups=2), [server], unwatched)
    measured = load().workload.requests()
    assert server.requests[2:] == measured
    assert server.requests[0].prompt_token_ids == measured[0].prompt_token_ids[::-1]
    [report] = result.reports
    assert report.num_requests == 6
    # Drafts of the warm-ups are not counted either.
    assert report.draft_acceptance == 0.5
    assert report.tokens_per_step == report.num_output_tokens / (report.num_output_tokens - 6)


async def test_a_server_that_fails_the_warm_up_is_not_measured(server):
    failing = Workload(
        num_requests=1,
        prompt_lengths=lengths("1"),
        output_lengths=lengths("1"),
        token_ids=range(1),
    )
    with pytest.raises(RequestFailed, match="scripted: scripted failure"):
        await run(load(workload=failing, num_warmups=1), [server], unwatched)


async def test_a_measurement_is_kept_if_nothing_is_known_of_the_workers_afterwards(
    server, monkeypatch
):
    count = server.decode_counts

    async def decode_counts() -> DecodeCounts:
        if server.requests:
            raise RequestFailed("the scheduler: unavailable")
        return await count()

    monkeypatch.setattr(server, "decode_counts", decode_counts)
    [report] = (await run(load(), [server], unwatched)).reports
    assert (report.num_requests, report.tokens_per_step) == (6, None)
