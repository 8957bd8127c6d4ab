"""Random load and failures on the whole scheduler: real gRPC, real Redis, simulated workers."""

import asyncio
import itertools
import math
import traceback
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import redis
from checking_worker import CheckingWorker
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)
from scheduler_load import FAILING, Load, Request, worker_name
from scheduler_stack import Stack, running_stack

from scheduler_svc.lane import multi_step, stall_watch
from scheduler_svc.lane.loop import LaneLoop
from scheduler_svc.lane.steps.step import Step

_decide = LaneLoop._decide

LENGTHS = st.one_of(st.sampled_from([1, 2, 3, 4, 5, 8, 16, 17]), st.integers(1, 63))
# Some of these fail.
SEEDS = st.sampled_from([*range(40), *(seed for seed, _ in FAILING)])
REQUESTS = st.fixed_dictionaries(
    {
        "gateway": st.integers(0, 1),
        "length": LENGTHS,
        "tag": st.integers(0, 1),
        "max_tokens": st.sampled_from([1, 2, 3, 5, 30]),
        "seed": SEEDS,
        "stop_at": st.none() | st.integers(0, 6),
        "n": st.sampled_from([1, 1, 1, 2, 3, 16]),
        "priority": st.integers(-1, 1),
        "num_logprobs": st.sampled_from([0, 0, 1, 4]),
        "num_prompt_logprobs": st.sampled_from([0, 0, 1, 3]),
        "num_lookahead_tokens": st.sampled_from([0, 0, 1, 4, 16]),
        "without_drafts": st.sampled_from([False, False, True]),
        "beam_width": st.sampled_from([0, 0, 0, 0, 1, 2, 3, 8]),
        "principal": st.sampled_from(["", "", "a", "bb"]),
    }
)


@st.composite
def pools(draw: st.DrawFn, block_size: int, max_model_len: int) -> dict[str, Any]:
    """Pools down to one that holds exactly the longest sequence."""
    return {
        "num_blocks": 1 + max_model_len // block_size + draw(st.sampled_from([0, 0, 1, 4, 30])),
        "block_size": block_size,
        "max_model_len": max_model_len,
        "max_num_seqs": draw(st.sampled_from([8, 3, 16, 1])),
        "num_host_blocks": draw(st.sampled_from([64, 4, 0])),
        "longest_jump": draw(st.sampled_from([0, 1, 3, 16])),
        "num_holds": draw(st.sampled_from([0, 0, 1, 3])),
        "num_speculative_tokens": draw(st.sampled_from([0, 0, 1, 3, 5])),
        "acceptance_rate": draw(st.sampled_from([0.7, 0.0, 0.3, 1.0])),
        "num_stages": draw(st.sampled_from([1, 1, 2, 3])),
    }


@st.composite
def worker_sets(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Workers of different sizes with one model."""
    block_size = draw(st.sampled_from([2, 4, 16]))
    max_model_len = draw(st.sampled_from([32, 64]))
    return draw(st.lists(pools(block_size, max_model_len), min_size=1, max_size=3))


@st.composite
def scheduler_settings(draw: st.DrawFn) -> dict[str, object]:
    return {
        "watermark": draw(st.sampled_from([0.0, 0.02])),
        "max_num_batched_tokens": draw(st.sampled_from([16, 24, 32])),
        "batch_policy": draw(st.sampled_from(["chunked", "prefill_first"])),
        "scheduling_policy": draw(st.sampled_from(["fcfs", "priority"])),
        "preemption_mode": draw(st.sampled_from(["auto", "recompute", "swap"])),
        "pipeline_depth": draw(st.integers(1, 4)),
        "long_prefill_token_threshold": draw(st.sampled_from([0, 6])),
        "max_num_partial_prefills": draw(st.sampled_from([None, 1, 2])),
        "max_long_partial_prefills": draw(st.sampled_from([None, 1])),
        "enable_prefix_caching": draw(st.booleans()),
        # Each check ends the steady state of a lane.
        "check_every_step": draw(st.booleans()),
        "num_lookahead_slots": draw(st.sampled_from([0, 0, 1, 5])),
        "placement": draw(st.sampled_from(["least_work", "round_robin"])),
    }


class SchedulerMachine(RuleBasedStateMachine):
    """A leading scheduler, one to three workers, two gateways; Redis is empty at first."""

    runner: ClassVar[asyncio.Runner]
    redis_url: ClassVar[str]
    directories: ClassVar[pytest.TempPathFactory]
    first_failure: ClassVar[BaseException | None]

    def __init__(self) -> None:
        super().__init__()
        self.running: AbstractAsyncContextManager[Stack] | None = None
        self.failed = False

    def drive(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            self.runner.run(work)
        except BaseException as failure:
            self.failed = True
            SchedulerMachine.first_failure = SchedulerMachine.first_failure or failure
            raise

    @initialize(
        pools=worker_sets(),
        options=scheduler_settings(),
        requests=st.lists(REQUESTS, min_size=4, max_size=16),
        all_unary=st.booleans(),
    )
    def start(
        self,
        pools: list[dict[str, Any]],
        options: dict[str, object],
        requests: list[dict[str, Any]],
        all_unary: bool,
    ) -> None:
        self.drive(self._start(pools, options, all_unary))
        self.submit(requests)

    async def _start(
        self, pools: list[dict[str, Any]], options: dict[str, object], all_unary: bool
    ) -> None:
        self.pools = pools
        with redis.Redis.from_url(self.redis_url) as client:
            client.flushall()
        self.incarnations = itertools.count(1)
        self.workers = [CheckingWorker(next(self.incarnations), **pool) for pool in pools]
        self.running = running_stack(
            self.redis_url,
            self.directories.mktemp("m"),
            {worker_name(index): worker for index, worker in enumerate(self.workers)},
            **{**options, "drain_grace_s": 1, "lease_s": 0.6},
        )
        stack = await self.running.__aenter__()
        self.load = Load(stack, self.workers, pools[0]["max_model_len"], all_unary)
        await self.load.start()

    def teardown(self) -> None:
        if self.running is None:
            return
        try:
            if not self.failed:
                self.drive(self.load.finish())
                self.drive(self.load.check())
        finally:
            self.drive(self._stop(self.running))

    async def _stop(self, running: AbstractAsyncContextManager[Stack]) -> None:
        for worker in self.workers:
            worker.gate.set()
        await running.__aexit__(None, None, None)

    @rule(requests=st.lists(REQUESTS, min_size=1, max_size=8))
    def submit(self, requests: list[dict[str, Any]]) -> None:
        for request in requests:
            self.drive(self.load.submit(**request))

    @rule(which=st.integers(0, 20))
    def cancel(self, which: int) -> None:
        if request := self._pick(self.load.open, which):
            self.drive(self.load.cancel(request))

    @rule(which=st.integers(0, 20), choice=st.integers(0, 15), back=st.integers(0, 3))
    def cut(self, which: int, choice: int, back: int) -> None:
        if request := self._pick(self.load.open, which):
            choice %= len(request.received.choices)
            num_tokens = len(request.received.choices[choice].token_ids)
            if num_tokens:
                self.drive(self.load.cut(request, choice, max(1, num_tokens - back)))

    @rule(which=st.integers(0, 20), gateway=st.integers(0, 1), client_gone=st.booleans())
    def move_stream(self, which: int, gateway: int, client_gone: bool) -> None:
        known = [request for request in self.load.open if request.received.accepted]
        if request := self._pick(known, which):
            self.drive(self.load.move_stream(request, gateway, client_gone))

    @rule(gateway=st.sampled_from([*[None] * 9, 0, 1]))
    def replace_gateway(self, gateway: int | None) -> None:
        if gateway is not None:
            self.drive(self.load.replace_gateway(gateway))

    @rule(which=st.sampled_from([*[None] * 9, 0, 1, 2]))
    def replace_worker(self, which: int | None) -> None:
        if which is not None:
            which %= len(self.workers)
            worker = CheckingWorker(next(self.incarnations), **self.pools[which])
            self.drive(self.load.replace_worker(which, worker))

    @rule(which=st.sampled_from([*[None] * 4, 0, 1, 2]))
    def lose_result(self, which: int | None) -> None:
        if which is not None:
            self.load.lose_result(which % len(self.workers))

    @rule(which=st.integers(0, 2))
    def drain_worker(self, which: int) -> None:
        """Its requests go to other workers, if there are any."""
        self.workers[which % len(self.workers)].drain()

    @rule(which=st.integers(0, 2))
    def stop_draining(self, which: int) -> None:
        self.workers[which % len(self.workers)].stop_draining()

    @rule(drained=st.sampled_from([*[None] * 9, True, False]))
    def replace_leader(self, drained: bool | None) -> None:
        if drained is not None:
            self.drive(self.load.replace_leader(drained))

    @rule(is_meant=st.sampled_from([*[False] * 9, True]))
    def empty_redis(self, is_meant: bool) -> None:
        if is_meant:
            self.drive(self.load.empty_redis())

    @rule(which=st.integers(0, 2))
    def hold_back(self, which: int) -> None:
        """Hold the worker's steps back."""
        self.workers[which % len(self.workers)].gate.clear()

    @rule(which=st.integers(0, 2))
    def let_run(self, which: int) -> None:
        self.workers[which % len(self.workers)].gate.set()

    @rule(num_moves=st.integers(1, 12))
    def pass_time(self, num_moves: int) -> None:
        self.drive(self.load.pass_time(num_moves))

    @rule()
    def finish(self) -> None:
        self.drive(self.load.finish())

    @staticmethod
    def _pick(requests: list[Request], which: int) -> Request | None:
        return requests[which % len(requests)] if requests else None


def _assert_steps_are_known(loop: LaneLoop) -> None:
    """Assert that everything that waits for a result has a plan in flight."""
    table, in_flight, lane = loop._table, loop.in_flight.sequences, loop._worker.incarnation
    waiting = [*table.rows, *table.awaiting_results]
    waiting += [sequence for group in table.swapped for sequence in group.sequences]
    late = [one for one in waiting if one.last_step > table.completed_step]
    # The first beam stands for a search that awaits results.
    flying = {one.group if one.is_beam else one for one in in_flight}
    unknown = [one for one in late if (one.group if one.is_beam else one) not in flying]
    unknown += [row for row in table.rows_in_flight() if row not in in_flight]
    groups = {one.group: None for one in (*waiting, *table.assigned)}
    here = [one for group in groups for one in group.sequences if one.lane_incarnation == lane]
    unknown += [one for one in here if one.last_step > loop._pool.last_step]
    assert not unknown, [(one.sequence_id, one.last_step) for one in unknown]


def _checking_decide(loop: LaneLoop, *args: Any) -> Step:
    _assert_steps_are_known(loop)
    return _decide(loop, *args)


def _run_machine(redis_url: str, directories: pytest.TempPathFactory, **profile: object) -> None:
    # Plans of several rounds, however recent the last arrival is.
    with (
        asyncio.Runner() as runner,
        patch.object(multi_step, "_SHARE", 1000),
        patch.object(LaneLoop, "_decide", _checking_decide),
        # The load notices a stall itself.
        patch.object(stall_watch, "STALL_S", math.inf),
    ):
        SchedulerMachine.runner = runner
        SchedulerMachine.redis_url = redis_url
        SchedulerMachine.directories = directories
        SchedulerMachine.first_failure = None
        try:
            run_state_machine_as_test(
                SchedulerMachine,
                settings=settings(
                    deadline=None,
                    database=None,
                    suppress_health_check=list(HealthCheck),
                    **profile,  # type: ignore[arg-type]
                ),
            )
        except Flaky as flaky:
            if SchedulerMachine.first_failure is None:
                raise
            raise _flaky_error(SchedulerMachine.first_failure, flaky) from None


def _flaky_error(failure: BaseException, flaky: Flaky) -> AssertionError:
    """The first failure in a few lines, followed by the steps, which pass when run again."""
    lines = "".join(traceback.format_exception(failure, limit=-4, chain=False)).splitlines()
    error = AssertionError("\n".join(["it failed once and passed when run again:", *lines[-19:]]))
    error.__notes__ = getattr(flaky, "__notes__", [])
    return error


@pytest.mark.timeout(300)
def test_every_request_ends_as_expected(redis_url, tmp_path_factory):
    _run_machine(
        redis_url, tmp_path_factory, max_examples=4, stateful_step_count=40, derandomize=True
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_request_ends_as_expected_for_long(redis_url, tmp_path_factory):
    _run_machine(redis_url, tmp_path_factory, max_examples=50, stateful_step_count=50)
