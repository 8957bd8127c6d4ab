"""Calls beside the calling thread."""

import threading
import weakref

import pytest

from worker_svc.grammar.beside import BesideThread


def test_a_call_runs_beside_the_caller() -> None:
    thread, entered, goes_on = BesideThread("beside"), threading.Event(), threading.Event()
    names = []

    def call() -> None:
        entered.set()
        assert goes_on.wait(10)
        names.append(threading.current_thread().name)

    for _ in range(2):
        entered.clear()
        goes_on.clear()
        thread.begin(call)
        assert entered.wait(10)
        goes_on.set()
        thread.join()
    assert names == ["beside", "beside"]


def test_an_error_is_raised_where_the_call_is_joined() -> None:
    thread = BesideThread("beside")
    thread.begin(lambda: {}["missing"])
    with pytest.raises(KeyError, match="missing"):
        thread.join()
    thread.begin(list)
    thread.join()


def test_the_thread_ends_with_its_object_and_holds_no_call() -> None:
    thread = BesideThread("beside, ending")
    [own] = [each for each in threading.enumerate() if each.name == "beside, ending"]
    event = threading.Event()
    called = weakref.ref(event)
    thread.begin(event.set)
    thread.join()
    del event, thread
    own.join(10)
    assert not own.is_alive()
    assert called() is None
