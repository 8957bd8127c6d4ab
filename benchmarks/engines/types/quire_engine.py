"""Serves the model on a private stack through its gateway over gRPC."""

import time
from collections.abc import Iterator, Sequence

from benchmarks.engines.child import job
from benchmarks.engines.types.serving import Prompt, serve_engine
from benchmarks.scheduler.proc import peak_rss_mb
from quire.client.client import Client
from quire.client.sampling_params import SamplingParams
from quire.launcher.stack import LocalStack


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


def main() -> None:
    given = job()
    began_s = time.perf_counter()
    local = LocalStack(given["model"], settings=given["settings"])
    with local, Client(local.address) as client:
        ready_s = time.perf_counter() - began_s
        [worker] = local.processes("worker")
        more = {"ready_s": lambda: ready_s, "peak_rss_mb": lambda: peak_rss_mb(worker.pid)}
        serve_engine(QuireEngine(client), given, more)


if __name__ == "__main__":
    main()
