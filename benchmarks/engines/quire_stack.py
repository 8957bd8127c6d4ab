"""The whole of Quire: a private stack, asked through its gateway over gRPC."""

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event

from benchmarks.engines.answers import answer, job
from benchmarks.engines.workload import MAX_MODEL_LEN, MAX_NUM_SEQS, Work
from benchmarks.scheduler.proc import peak_rss_mb
from quire.client import Client
from quire.internal.v1.operations_pb2 import WorkerStatus
from quire.launcher.stack import LocalStack
from quire.operations import Operations
from quire.prompts import Prompt
from quire.sampling import SamplingParams

_ASK_TIMEOUT_S = 10.0
_POLL_S = 0.05
_NS_PER_S = 10**9


class Stack:
    """A running stack, seen by a client and by an operator."""

    def __init__(self, stack: LocalStack, client: Client, operations: Operations) -> None:
        self._client = client
        self._operations = operations
        [self._worker] = stack.processes("worker")

    def run(self, work: Work) -> dict[str, object]:
        """All requests at once, as `LLM.generate` sends them."""
        self._operations.reset_prefix_cache(_ASK_TIMEOUT_S)
        params = [
            SamplingParams(temperature=work.temperature, max_tokens=count, ignore_eos=True)
            for count in work.num_outputs
        ]
        prompts: list[Prompt] = list(work.prompts)
        over = Event()
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(self._first_step_over, self._status().busy_ns, over)
            try:
                began_s = time.perf_counter()
                written = self._client.generate_all(prompts, params)
                seconds = time.perf_counter() - began_s
            finally:
                over.set()
            before, after = first.result(), self._status()
        return {
            "seconds": seconds,
            "outputs": [request.outputs[0].token_ids for request in written],
            "busy_s": (after.busy_ns - before.busy_ns) / _NS_PER_S,
            "idle_s": (after.idle_ns - before.idle_ns) / _NS_PER_S,
            "starting_s": (after.starting_ns - before.starting_ns) / _NS_PER_S,
        }

    def peak_rss_mb(self) -> float:
        """The worker's largest resident memory so far, in units of 10^6 bytes."""
        return peak_rss_mb(self._worker.pid)

    def _first_step_over(self, busy_ns: int, over: Event) -> WorkerStatus:
        """What the worker has counted when its first step has landed, or all is over: the pause
        before the work, which nobody caused, is part of that step's waiting."""
        while (status := self._status()).busy_ns == busy_ns and not over.wait(_POLL_S):
            pass
        return status

    def _status(self) -> WorkerStatus:
        status = self._operations.status(with_block_maps=False, timeout_s=_ASK_TIMEOUT_S)
        if not status.workers:
            raise RuntimeError("the scheduler has lost its worker: the machine is too busy")
        return status.workers[0]


def main() -> None:
    given = job()
    warmup, work = Work.of_json(given["warmup"]), Work.of_json(given["work"])
    settings = {
        "QUIRE_WORKER_DTYPE": "float32",
        "QUIRE_WORKER_DEVICE": "cpu",
        "QUIRE_WORKER_MAX_MODEL_LEN": str(MAX_MODEL_LEN),
        "QUIRE_WORKER_MAX_NUM_SEQS": str(MAX_NUM_SEQS),
        "QUIRE_WORKER_KV_CACHE_MEMORY": str(given["kv_cache_bytes"]),
    }
    began_s = time.perf_counter()
    local = LocalStack(given["model"], settings=settings)
    with (
        local,
        Client(local.address) as client,
        Operations(local.scheduler_address) as operations,
    ):
        ready_s = time.perf_counter() - began_s
        stack = Stack(local, client, operations)
        answer(
            {
                "warm": lambda: stack.run(warmup),
                "run": lambda: stack.run(work),
                "address": lambda: local.address,
                "ready_s": lambda: ready_s,
                "peak_rss_mb": stack.peak_rss_mb,
            }
        )


if __name__ == "__main__":
    main()
