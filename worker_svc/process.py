"""What has to be settled before torch is there and threads are."""

import os
from typing import Final

from worker_svc.memory import prepare_memory

# Looks of an OpenMP thread for its next work before it sleeps: a few microseconds.
_LOOKS: Final = 100


def prepare_process() -> None:
    """To be called before torch is imported.

    Few of torch's own operations run in a step, but after each its threads would look out for the
    next one for milliseconds, on the cores of the kernels' threads. The environment's own word goes
    before.
    """
    prepare_memory()
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(_LOOKS))
