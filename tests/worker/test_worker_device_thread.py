"""The thread that touches the device: order, and an end that leaves nothing running."""

import threading

from worker_svc.device_thread import DeviceThread


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
