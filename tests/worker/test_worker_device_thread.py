"""The thread that touches the device: order, steps behind one another, and an end that leaves
nothing running."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from worker_svc.device_thread import MOST_LAUNCHED, DeviceThread
from worker_svc.step_runner import Finished


@pytest.fixture
def thread() -> Iterator[DeviceThread]:
    thread = DeviceThread()
    yield thread
    assert thread.stop(wait_s=10)


class Step:
    """Work that ends when it is told to."""

    def __init__(self, name: str, told: list[str]) -> None:
        self.name = name
        self.launched, self.over = threading.Event(), threading.Event()
        self._told = told

    def __call__(self) -> "Step":
        self._told.append(f"{self.name} begins")
        self.launched.set()
        return self

    def is_ready(self) -> bool:
        return self.over.is_set()

    def output(self) -> str:
        self.over.wait()
        self._told.append(f"{self.name} is over")
        return self.name


@pytest.fixture
def told() -> list[str]:
    """What happened on the thread, in its order."""
    return []


@pytest.fixture
def steps(told: list[str]) -> list[Step]:
    return [Step(name, told) for name in "abc"]


def test_a_stop_waits_for_the_calls_before_it() -> None:
    thread = DeviceThread()
    started, go_on = threading.Event(), threading.Event()
    running = thread.submit(lambda: (started.set(), go_on.wait()))
    queued = thread.submit(lambda: "queued")
    started.wait()
    assert not thread.stop(wait_s=0)
    assert thread.submit(lambda: "late").cancelled()
    go_on.set()
    assert thread.stop(wait_s=10)
    assert running.done()
    assert queued.result() == "queued"


def test_a_step_is_launched_before_the_one_on_the_device_ends(
    thread: DeviceThread, steps: list[Step], told: list[str]
) -> None:
    futures = [thread.launch(step) for step in steps]
    assert steps[MOST_LAUNCHED - 1].launched.wait(10)
    # No more than the buffers are for.
    assert not steps[MOST_LAUNCHED].launched.is_set()
    assert not futures[0].done()
    for step in steps:
        step.over.set()
    assert [future.result(10) for future in futures] == ["a", "b", "c"]
    assert told[:4] == ["a begins", "b begins", "a is over", "c begins"]


def test_a_result_does_not_wait_for_another_step(thread: DeviceThread, steps: list[Step]) -> None:
    future = thread.launch(steps[0])
    assert steps[0].launched.wait(10)
    steps[0].over.set()
    assert future.result(10) == "a"
    # And a plan that comes while a step runs need not wait for its end.
    running = thread.launch(steps[1])
    assert steps[1].launched.wait(10)
    thread.launch(steps[2])
    assert steps[2].launched.wait(10)
    assert not running.done()
    steps[1].over.set()
    steps[2].over.set()


def test_other_calls_come_after_what_was_launched(
    thread: DeviceThread, steps: list[Step], told: list[str]
) -> None:
    thread.launch(steps[0])
    cleared = thread.submit(lambda: told.append("cleared"))
    assert steps[0].launched.wait(10)
    assert not cleared.done()
    steps[0].over.set()
    cleared.result(10)
    assert told == ["a begins", "a is over", "cleared"]


def _fails() -> Step:
    raise ValueError("no such row")


def test_a_launch_that_fails_says_so_in_its_turn(
    thread: DeviceThread, steps: list[Step], told: list[str]
) -> None:
    first = thread.launch(steps[0])
    failing = thread.launch(_fails)
    first.add_done_callback(lambda _: told.append("first is told"))
    failing.add_done_callback(lambda _: told.append("failing is told"))
    assert steps[0].launched.wait(10)
    steps[0].over.set()
    with pytest.raises(ValueError, match="no such row"):
        failing.result(10)
    # Its callbacks have run, too, when the thread goes on.
    thread.submit(told.copy).result(10)
    assert told == ["a begins", "a is over", "first is told", "failing is told"]


class LostStep(Step):
    """Work of a device that is lost, which shows when it has been asked for a few times."""

    def __init__(self, name: str, told: list[str], num_asked: int) -> None:
        super().__init__(name, told)
        self._num_left = num_asked

    def is_ready(self) -> bool:
        self._num_left -= 1
        if self._num_left < 0:
            raise RuntimeError("an illegal memory access was encountered")
        return False

    def output(self) -> str:
        raise RuntimeError("an illegal memory access was encountered")


@pytest.mark.parametrize("num_asked", [0, 1, 3])
def test_a_device_that_is_lost_is_told_of_by_its_steps(
    thread: DeviceThread, told: list[str], num_asked: int
) -> None:
    lost = thread.launch(LostStep("a", told, num_asked))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        lost.result(10)
    # Whoever clears the rows hears of it, too: the thread goes on.
    assert thread.submit(lambda: "next").result(10) == "next"


def test_what_is_over_at_once_is_settled_before_the_next_call(thread: DeviceThread) -> None:
    first = thread.launch(lambda: Finished(1))
    seen = thread.launch(lambda: Finished(first.done()))
    assert seen.result(10) is True


def test_held_calls_are_made_before_the_thread_waits(thread: DeviceThread) -> None:
    told: list[str] = []
    made = threading.Event()

    def step() -> Finished[str]:
        thread.hold(lambda: told.append("held"))
        thread.hold(made.set)
        told.append("step")
        return Finished("over")

    assert thread.launch(step).result(10) == "over"
    assert made.wait(10)
    assert told == ["step", "held"]


def test_held_calls_are_made_when_a_step_says_so_or_before_another_call(
    thread: DeviceThread,
) -> None:
    told: list[str] = []
    started, go_on = threading.Event(), threading.Event()

    def held(text: str) -> None:
        thread.hold(lambda: told.append(text))

    def second() -> Finished[str]:
        told.append("second begins")
        thread.make_held_calls()
        told.append("second computes")
        return Finished("second")

    thread.submit(lambda: (started.set(), go_on.wait()))
    started.wait()
    thread.launch(lambda: Finished("first"), lambda _: held("first is told of"))
    thread.launch(second, lambda _: held("second is told of"))
    last = thread.submit(lambda: told.append("last"))
    go_on.set()
    last.result(10)
    assert told == [
        "second begins",
        "first is told of",
        "second computes",
        "second is told of",
        "last",
    ]


def test_a_held_call_that_fails_harms_nobody(thread: DeviceThread) -> None:
    made = threading.Event()

    def step() -> Finished[str]:
        thread.hold(lambda: 1 / 0)
        thread.hold(made.set)
        return Finished("over")

    thread.launch(step)
    assert made.wait(10)
    assert thread.submit(lambda: "alive").result(10) == "alive"


def test_who_is_told_of_an_end(thread: DeviceThread) -> None:
    told: list[str] = []

    def done(future: Future[str]) -> None:
        told.append(f"{threading.current_thread().name} {future.cancelled()}")

    # Over before anybody could ask to be told of it.
    for _ in range(100):
        thread.launch(lambda: Finished("over"), done).result(10)
    started, go_on = threading.Event(), threading.Event()
    thread.submit(lambda: (started.set(), go_on.wait()))
    started.wait()
    thread.launch(lambda: Finished("never"), done).cancel()
    go_on.set()
    thread.submit(lambda: None).result(10)
    assert told == ["device False"] * 100 + [f"{threading.current_thread().name} True"]
