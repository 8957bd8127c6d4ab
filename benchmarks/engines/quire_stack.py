"""Runs the work on a private stack through its gateway over gRPC."""

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event

from benchmarks.engines.child import job, serve
from benchmarks.engines.workload import MAX_MODEL_LEN, MAX_NUM_SEQS, Work
from benchmarks.scheduler.proc import peak_rss_mb
from quire.client.client import Client
from quire.client.operations import Operations
from quire.client.prompts import Prompt
from quire.client.sampling_params import SamplingParams
from quire.internal.v1.operations_pb2 import WorkerStatus
from quire.launcher.stack import LocalStack

_RPC_TIMEOUT_S = 10.0
_POLL_S = 0.05
_NS_PER_S = 10**9


class Stack:
    """A running stack with a client and access to its operations service."""

    def __init__(self, stack: LocalStack, client: Client, operations: Operations) -> None:
        self._client = client
        self._operations = operations
        [self._worker] = stack.processes("worker")

    def run(self, work: Work) -> dict[str, object]:
        """Send all requests at once, as `LLM.generate` does."""
        self._operations.reset_prefix_cache(_RPC_TIMEOUT_S)
        params = [
            SamplingParams(temperature=work.temperature, max_tokens=count, ignore_eos=True)
            for count in work.num_outputs
        ]
        prompts: list[Prompt] = list(work.prompts)
        done = Event()
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(self._first_step, self._status().busy_ns, done)
            try:
                began_s = time.perf_counter()
                written = self._client.generate_all(prompts, params)
                seconds = time.perf_counter() - began_s
            finally:
                done.set()
            before, after = first.result(), self._status()
        return {
            "seconds": seconds,
            "outputs": [request.outputs[0].token_ids for request in written],
            "busy_s": (after.busy_ns - before.busy_ns) / _NS_PER_S,
            "idle_s": (after.idle_ns - before.idle_ns) / _NS_PER_S,
            "starting_s": (after.starting_ns - before.starting_ns) / _NS_PER_S,
        }

    def peak_rss_mb(self) -> float:
        """Return the worker's peak resident memory, in units of 10^6 bytes."""
        return peak_rss_mb(self._worker.pid)

    def _first_step(self, busy_ns: int, done: Event) -> WorkerStatus:
        """Return the worker's counters after its first step, or when `done` is set. They exclude
        the idle time before the work, which is counted with the first step."""
        while (status := self._status()).busy_ns == busy_ns and not done.wait(_POLL_S):
            pass
        return status

    def _status(self) -> WorkerStatus:
        status = self._operations.status(with_block_maps=False, timeout_s=_RPC_TIMEOUT_S)
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
        serve(
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
