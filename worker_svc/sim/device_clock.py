"""When a simulated device runs its steps."""

import time

from worker_svc.plan.plans import StepTimes


class DeviceClock:
    """Steps run back to back, as those that are queued on a GPU: while one runs, the host prepares
    the next one, as soon as its plan has arrived. What this process does late, for want of a
    processor, the device does not wait for."""

    def __init__(self) -> None:
        # The end of the last step, and of the last preparation, of time.monotonic_ns().
        self._free_ns = time.monotonic_ns()
        self._prepared_ns = 0

    def resume(self) -> None:
        """The device was held until now."""
        self._free_ns = time.monotonic_ns()

    def run(self, arrived_ns: int, started_ns: int, duration_ns: int) -> StepTimes:
        """Wait for the end of a step that was prepared from `started_ns` until now.

        `arrived_ns` is the arrival of its plan; 0: not before the preparation.
        """
        arrived_ns = arrived_ns or started_ns
        idle_since_ns = self._free_ns
        preparation_ns = max(arrived_ns, self._prepared_ns)
        self._prepared_ns = preparation_ns + time.monotonic_ns() - started_ns
        began_ns = max(idle_since_ns, preparation_ns)
        # The part of the preparation that nothing ran beside.
        preparing_ns = max(0, self._prepared_ns - began_ns)
        self._free_ns = began_ns + preparing_ns + duration_ns
        left_ns = self._free_ns - time.monotonic_ns()
        if left_ns > 0:
            time.sleep(left_ns / 1e9)
        return StepTimes(
            waiting_ns=began_ns - idle_since_ns,
            preparing_ns=preparing_ns,
            forward_ns=duration_ns,
            starting_ns=began_ns - max(idle_since_ns, min(arrived_ns, began_ns)),
        )
