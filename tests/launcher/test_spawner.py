import threading

import pytest

from quire.launcher.spawner import Spawner


def test_all_calls_run_in_one_separate_thread(spawner):
    first = spawner.call(threading.get_ident)
    assert first == spawner.call(threading.get_ident)
    assert first != threading.get_ident()


def test_errors_reach_the_caller(spawner):
    with pytest.raises(ZeroDivisionError):
        spawner.call(lambda: 1 // 0)
    assert spawner.call(lambda: "result") == "result"


def test_the_thread_ends_when_closed():
    spawner = Spawner()
    thread = spawner.call(threading.current_thread)
    spawner.close()
    thread.join(10)
    assert not thread.is_alive()
