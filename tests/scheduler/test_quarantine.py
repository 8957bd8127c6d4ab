"""Which requests fail because they crash workers, and which do not although workers crash."""

import random
from array import array

import pytest
from bare_groups import bare_group
from checking_worker import CheckingWorker
from scheduler_stack import INTERNAL, Stack, info_of, prompt, running_stack
from waiting import until

from scheduler_svc.core.crashes import MAX_CONCLUSIVE, MAX_CRASHES, MEMORY_S, CrashHistory
from scheduler_svc.core.request import Params
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.lane.quarantine import Quarantine
from scheduler_svc.lane.sequence_table import SequenceTable

NAMES = "abc"
PARAMS = Params(temperature=0, top_k=0, top_p=1, seed=0, max_tokens=8)


def sequence_of(request_id: str) -> Sequence:
    group = bare_group(request_id, PARAMS)
    sequence = Sequence(0, group, 0, array("I", [1]), num_prompt_tokens=1, num_tokens=1)
    group.sequences = [sequence]
    group.num_live = 1
    return sequence


class Workers:
    """Lanes that open and crash, by a clock of the test."""

    def __init__(self) -> None:
        self.now = 0.0
        self.crashes = CrashHistory()

    def lane(self, *assigned: Sequence) -> tuple[Quarantine, SequenceTable]:
        self.now += 1.0
        table = SequenceTable(8, 0)
        table.assigned = list(assigned)
        return Quarantine(table, lambda: self.now), table

    def crash(self, lane: Quarantine, *unfinished: Sequence, is_dead: bool = True) -> None:
        self.now += 0.001
        lane.worker_lost(set(unfinished), is_dead, self.crashes)

    def serve(self, lane: Quarantine, *sampled: Sequence) -> None:
        self.now += 0.001
        lane.completed(list(sampled))

    def crash_alone(self, suspect: Sequence, has_served: bool = True) -> None:
        """A worker that has run others, or has not, crashes while it runs the suspect alone."""
        lane, _ = self.lane(suspect)
        if has_served:
            self.serve(lane, sequence_of("served"))
        assert lane.suspect() is suspect
        self.crash(lane, suspect)


@pytest.fixture
def workers() -> Workers:
    return Workers()


@pytest.fixture
def suspect(workers: Workers) -> Sequence:
    """A sequence that ran in a batch when its worker crashed."""
    suspect = sequence_of("suspect")
    workers.crash(workers.lane(suspect)[0], suspect, sequence_of("neighbour"))
    assert suspect.is_suspect
    return suspect


def test_a_request_fails_after_three_conclusive_crashes(workers, suspect):
    for _ in range(MAX_CONCLUSIVE - 1):
        workers.crash_alone(suspect)
        assert suspect.group.error is None
    workers.crash_alone(suspect)
    assert suspect.group.error.code.name == "INTERNAL"
    assert suspect.group.error.message.startswith("3 workers in a row crashed")


def test_six_crashes_are_needed_of_workers_that_ran_nothing_else(workers, suspect):
    """The worker may crash with any request."""
    for _ in range(MAX_CRASHES - 1):
        workers.crash_alone(suspect, has_served=False)
        assert suspect.group.error is None
    workers.crash_alone(suspect, has_served=False)
    assert suspect.group.error is not None


def test_six_crashes_are_needed_after_one_of_a_worker_that_did_not_run_the_request(
    workers, suspect
):
    workers.crash(workers.lane()[0], sequence_of("other"))
    for _ in range(MAX_CRASHES - 1):
        workers.crash_alone(suspect)
        assert suspect.group.error is None
    workers.crash_alone(suspect)
    assert suspect.group.error is not None


def test_a_crash_of_another_worker_is_forgotten_after_a_minute(workers, suspect):
    # Also that of an idle worker.
    workers.crash(workers.lane()[0])
    workers.now += MEMORY_S + 1
    for _ in range(MAX_CONCLUSIVE):
        workers.crash_alone(suspect)
    assert suspect.group.error is not None


def test_a_finished_step_acquits(workers, suspect):
    for _ in range(MAX_CONCLUSIVE - 1):
        workers.crash_alone(suspect)
    lane, _ = workers.lane(suspect)
    assert lane.suspect() is suspect
    workers.serve(lane, suspect)
    assert not suspect.is_suspect
    assert lane.suspect() is None
    workers.crash(workers.lane(suspect)[0], suspect)
    for _ in range(MAX_CONCLUSIVE - 1):
        workers.crash_alone(suspect)
    assert suspect.group.error is None


def test_a_silent_worker_is_no_evidence(workers, suspect):
    for _ in range(2 * MAX_CRASHES):
        lane, _ = workers.lane(suspect)
        assert lane.suspect() is suspect
        workers.crash(lane, suspect, is_dead=False)
    assert suspect.group.error is None


def test_crashes_of_all_choices_of_a_request_count_together(workers, suspect):
    other = Sequence(1, suspect.group, 1, array("I", [1]), num_prompt_tokens=1, num_tokens=1)
    suspect.group.sequences.append(other)
    other.is_suspect = True
    workers.crash_alone(suspect)
    workers.crash_alone(suspect)
    workers.crash_alone(other)
    assert suspect.group.error is not None


def test_the_suspect_with_the_fewest_crashes_runs_first(workers, suspect):
    workers.crash_alone(suspect)
    other = sequence_of("other")
    other.is_suspect = True
    lane, _ = workers.lane(suspect, other)
    assert lane.suspect() is other
    workers.serve(lane, other)
    assert lane.suspect() is suspect


def test_a_suspect_with_a_crash_waits_until_the_worker_has_run_others(workers, suspect):
    first, _ = workers.lane(suspect, sequence_of("other"))
    assert first.suspect() is suspect
    workers.crash(first, suspect)
    other = sequence_of("other")
    lane, table = workers.lane(suspect, other)
    assert lane.suspect() is None
    table.assigned.remove(other)
    table.rows.admit(other)
    assert lane.suspect() is None
    workers.serve(lane, other)
    assert lane.suspect() is suspect


async def kill(stack: Stack, name: str, killed: list[CheckingWorker]) -> None:
    """Replace a worker by another process at its address."""
    worker, _ = stack.workers[name]
    killed.append(worker)
    await stack.stop_worker(name)
    successor = CheckingWorker(worker.hello.incarnation + 10)
    successor.poison = worker.poison
    await stack.start_worker(name, successor)


@pytest.mark.parametrize("is_poisoned", [False, True], ids=["", "poisoned"])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]
)
async def test_random_kills_of_two_workers_fail_no_innocent_request(
    redis_url, sockets, monkeypatch, seed, is_poisoned
):
    monkeypatch.setattr("scheduler_svc.engine.discovery.RETRY_S", 0.02)
    draw, killed = random.Random(seed), []
    workers = {name: CheckingWorker(index + 1) for index, name in enumerate(NAMES)}

    def all_workers() -> list[CheckingWorker]:
        return [*killed, *(worker for worker, _ in stack.workers.values())]

    async def sampled(count: int) -> None:
        """Wait until the workers have sampled so many more tokens, or all requests have ended."""
        target = sum(worker.num_sampled_tokens for worker in all_workers()) + count
        await until(
            lambda: (
                sum(worker.num_sampled_tokens for worker in all_workers()) >= target
                or all(received.is_ended for received in innocent)
            ),
            "tokens",
            60,
        )

    async with running_stack(redis_url, sockets, workers) as stack:
        gateway = await stack.gateway()
        innocent = [
            gateway.received[await gateway.submit(prompt(9, tag), max_tokens=50, seed=tag)]
            for tag in range(16)
        ]
        if is_poisoned:
            for worker in workers.values():
                worker.poison.add(99)
            poisoned = gateway.received[await gateway.submit(prompt(9, 99), seed=99)]
        while not all(received.is_ended for received in innocent):
            await sampled(draw.randint(10, 60))
            first, second = draw.sample(NAMES, 2)
            await kill(stack, first, killed)
            # At the same moment, or a few steps later.
            await sampled(draw.choice([0, 0, 1, 5, 20, 40]))
            await kill(stack, second, killed)
        assert all(received.is_whole for received in innocent)
        assert len(killed) >= 6
        if is_poisoned:
            await until(lambda: poisoned.is_ended, "the end of the poisoned request", 60)
            assert poisoned.failure.code == INTERNAL
            assert info_of(poisoned.failure).reason == "POISON"
            assert sum(worker.num_poisoned for worker in all_workers()) <= 1 + MAX_CRASHES
        await until(lambda: not stack.engine.live, "the end of all")
        for worker, _ in stack.workers.values():
            assert not worker.runner.kv_checker.violations
