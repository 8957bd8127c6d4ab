"""Serves the model on a private stack through its gateway over gRPC."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.engines.child import Handler, job
from benchmarks.engines.types.serving import Prompt, serve_engine
from benchmarks.scheduler.proc import peak_rss_mb
from quire.client.client import Client
from quire.client.sampling_params import SamplingParams
from quire.launcher.stack import LocalStack

_NUM_STARTS = 3
_CACHE_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class _Start:
    client: Client
    worker_pid: int
    ready_s: float


class QuireEngine:
    def __init__(self, client: Client) -> None:
        self._client = client

    def run(self, prompts: Sequence[Prompt], num_outputs: int) -> list[int]:
        params = [_params(num_outputs)] * len(prompts)
        written = self._client.generate_all(prompts, params)
        return [len(request.outputs[0].token_ids) for request in written]

    def stream(self, prompt: Prompt, num_outputs: int) -> Iterator[int]:
        for delta in self._client.stream_generate(prompt, _params(num_outputs)):
            if count := sum(len(output.token_ids) for output in delta.outputs):
                yield count


def _params(num_outputs: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_outputs, ignore_eos=True)


def _start(given: Mapping[str, Any], cache: Path, stack: ExitStack) -> _Start:
    began_s = time.perf_counter()
    settings = {**given["settings"], "QUIRE_WORKER_WEIGHT_CACHE": str(cache)}
    local = stack.enter_context(LocalStack(given["model"], settings=settings))
    client = stack.enter_context(Client(local.address))
    ready_s = time.perf_counter() - began_s
    [worker] = local.processes("worker")
    return _Start(client, worker.pid, ready_s)


def _first_start(given: Mapping[str, Any], cache: Path) -> tuple[float, float]:
    """Start without packed weights in the cache, and wait until they are there. Return seconds and
    the worker's peak memory."""
    with ExitStack() as stack:
        start = _start(given, cache, stack)
        deadline_s = time.monotonic() + _CACHE_TIMEOUT_S
        while not any(cache.glob("*.packed")):
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"no packed weights in {cache} after {_CACHE_TIMEOUT_S:g} s")
            time.sleep(0.1)
        return start.ready_s, peak_rss_mb(start.worker_pid)


def main() -> None:
    given = job()
    with ExitStack() as stack:
        cache = Path(stack.enter_context(TemporaryDirectory()))
        serving = stack.enter_context(ExitStack())
        firsts, seconds = [], []
        for number in range(_NUM_STARTS):
            serving.close()
            folder = cache / str(number)
            firsts.append(_first_start(given, folder))
            last = _start(given, folder, serving)
            seconds.append(last.ready_s)
        first_s, peaks_mb = zip(*firsts, strict=True)
        more: dict[str, Handler] = {
            "ready_s": lambda: median(first_s),
            "cached_ready_s": lambda: median(seconds),
            "peak_rss_mb": lambda: max(*peaks_mb, peak_rss_mb(last.worker_pid)),
        }
        serve_engine(QuireEngine(last.client), given, more)


if __name__ == "__main__":
    main()
