"""The device thread: order of calls, queued steps, postponed calls, and its end."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from worker_svc.runner.device_thread import MAX_IN_FLIGHT, DeviceThread
from worker_svc.runner.step_runner import ReadyOutput


@pytest.fixture
def thread() -> Iterator[DeviceThread]:
    thread = DeviceThread()
    yield thread
    assert thread.stop(wait_s=10)


class Step:
    """Work that ends when `over` is set."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.name = name
        self.launched, self.over = threading.Event(), threading.Event()
        self._events = events

    def __call__(self) -> "Step":
        self._events.append(f"{self.name} begins")
        self.launched.set()
        return self

    def is_ready(self) -> bool:
        return self.over.is_set()

    def output(self) -> str:
        self.over.wait()
        self._events.append(f"{self.name} is over")
        return self.name


@pytest.fixture
def events() -> list[str]:
    """What happened on the thread, in order."""
    return []


@pytest.fixture
def steps(events: list[str]) -> list[Step]:
    return [Step(name, events) for name in "abc"]


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
    thread: DeviceThread, steps: list[Step], events: list[str]
) -> None:
    futures = [thread.launch(step) for step in steps]
    assert steps[MAX_IN_FLIGHT - 1].launched.wait(10)
    # No more than the buffers are for.
    assert not steps[MAX_IN_FLIGHT].launched.is_set()
    assert not futures[0].done()
    for step in steps:
        step.over.set()
    assert [future.result(10) for future in futures] == ["a", "b", "c"]
    assert events[:4] == ["a begins", "b begins", "a is over", "c begins"]


def test_a_result_does_not_wait_for_another_step(thread: DeviceThread, steps: list[Step]) -> None:
    future = thread.launch(steps[0])
    assert steps[0].launched.wait(10)
    steps[0].over.set()
    assert future.result(10) == "a"
    # A plan that arrives while a step runs is launched at once.
    running = thread.launch(steps[1])
    assert steps[1].launched.wait(10)
    thread.launch(steps[2])
    assert steps[2].launched.wait(10)
    assert not running.done()
    steps[1].over.set()
    steps[2].over.set()


def test_calls_run_after_launched_work(
    thread: DeviceThread, steps: list[Step], events: list[str]
) -> None:
    thread.launch(steps[0])
    cleared = thread.submit(lambda: events.append("cleared"))
    assert steps[0].launched.wait(10)
    assert not cleared.done()
    steps[0].over.set()
    cleared.result(10)
    assert events == ["a begins", "a is over", "cleared"]


def _fails() -> Step:
    raise ValueError("no such row")


def test_a_failed_launch_is_reported_in_order(
    thread: DeviceThread, steps: list[Step], events: list[str]
) -> None:
    first = thread.launch(steps[0])
    failing = thread.launch(_fails)
    first.add_done_callback(lambda _: events.append("first is done"))
    failing.add_done_callback(lambda _: events.append("failing is done"))
    assert steps[0].launched.wait(10)
    steps[0].over.set()
    with pytest.raises(ValueError, match="no such row"):
        failing.result(10)
    # Its callbacks ran before the thread continued.
    thread.submit(events.copy).result(10)
    assert events == ["a begins", "a is over", "first is done", "failing is done"]


class LostStep(Step):
    """Work of a lost device, which raises after `is_ready` was called a few times."""

    def __init__(self, name: str, events: list[str], num_asked: int) -> None:
        super().__init__(name, events)
        self._num_left = num_asked

    def is_ready(self) -> bool:
        self._num_left -= 1
        if self._num_left < 0:
            raise RuntimeError("an illegal memory access was encountered")
        return False

    def output(self) -> str:
        raise RuntimeError("an illegal memory access was encountered")


@pytest.mark.parametrize("num_asked", [0, 1, 3])
def test_a_lost_device_is_reported_by_its_steps(
    thread: DeviceThread, events: list[str], num_asked: int
) -> None:
    lost = thread.launch(LostStep("a", events, num_asked))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        lost.result(10)
    # The thread continues.
    assert thread.submit(lambda: "next").result(10) == "next"


def test_work_that_is_ready_at_once_is_completed_before_the_next_call(thread: DeviceThread) -> None:
    first = thread.launch(lambda: ReadyOutput(1))
    seen = thread.launch(lambda: ReadyOutput(first.done()))
    assert seen.result(10) is True


def test_postponed_calls_run_before_the_thread_waits(thread: DeviceThread) -> None:
    events: list[str] = []
    made = threading.Event()

    def step() -> ReadyOutput[str]:
        thread.postpone(lambda: events.append("postponed"))
        thread.postpone(made.set)
        events.append("step")
        return ReadyOutput("over")

    assert thread.launch(step).result(10) == "over"
    assert made.wait(10)
    assert events == ["step", "postponed"]


def test_postponed_calls_run_at_run_postponed_or_before_another_call(
    thread: DeviceThread,
) -> None:
    events: list[str] = []
    started, go_on = threading.Event(), threading.Event()

    def postpone(text: str) -> None:
        thread.postpone(lambda: events.append(text))

    def second() -> ReadyOutput[str]:
        events.append("second begins")
        thread.run_postponed()
        events.append("second computes")
        return ReadyOutput("second")

    thread.submit(lambda: (started.set(), go_on.wait()))
    started.wait()
    thread.launch(lambda: ReadyOutput("first"), lambda _: postpone("first is reported"))
    thread.launch(second, lambda _: postpone("second is reported"))
    last = thread.submit(lambda: events.append("last"))
    go_on.set()
    last.result(10)
    assert events == [
        "second begins",
        "first is reported",
        "second computes",
        "second is reported",
        "last",
    ]


def test_a_failed_postponed_call_does_not_end_the_thread(thread: DeviceThread) -> None:
    made = threading.Event()

    def step() -> ReadyOutput[str]:
        thread.postpone(lambda: 1 / 0)
        thread.postpone(made.set)
        return ReadyOutput("over")

    thread.launch(step)
    assert made.wait(10)
    assert thread.submit(lambda: "alive").result(10) == "alive"


def test_done_is_called_on_the_thread_or_by_the_canceller(thread: DeviceThread) -> None:
    events: list[str] = []

    def done(future: Future[str]) -> None:
        events.append(f"{threading.current_thread().name} {future.cancelled()}")

    # Done before a callback could be added to the returned future.
    for _ in range(100):
        thread.launch(lambda: ReadyOutput("over"), done).result(10)
    started, go_on = threading.Event(), threading.Event()
    thread.submit(lambda: (started.set(), go_on.wait()))
    started.wait()
    thread.launch(lambda: ReadyOutput("never"), done).cancel()
    go_on.set()
    thread.submit(lambda: None).result(10)
    assert events == ["device False"] * 100 + [f"{threading.current_thread().name} True"]
