"""Runs the loads on an engine in its child process.

Imports only the standard library, because Pythons of other environments run it, too.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, Protocol

from benchmarks.engines.child import Handler, serve

Prompt = list[int]


class Engine(Protocol):
    """An engine that has loaded its model. It decodes greedily and ignores ends of sequences."""

    def run(self, prompts: Sequence[Prompt], num_outputs: int) -> list[int]:
        """Send all requests at once, and return the number of tokens of each output."""

    def stream(self, prompt: Prompt, num_outputs: int) -> Iterator[int]:
        """Yield the number of new tokens as soon as there are any."""


def serve_engine(
    engine: Engine, given: Mapping[str, Any], more: Mapping[str, Handler] | None = None
) -> None:
    """Execute the loads of the job as commands, and further ones."""
    num_outputs, prompts = given["num_outputs"], given["prompts"]
    runs: dict[str, Callable[[], object]] = {
        name: partial(run_at_once, engine, repetitions, num_outputs)
        for name, repetitions in prompts.items()
    }
    runs["stream"] = partial(run_streams, engine, prompts["stream"], num_outputs)
    serve({**runs, **(more or {})})


def run_at_once(
    engine: Engine, repetitions: Sequence[Sequence[Prompt]], num_outputs: int
) -> dict[str, float]:
    """Return the seconds of all repetitions, and their tokens per second, those of the prompts
    included."""
    num_tokens = 0
    began_s = time.perf_counter()
    for prompts in repetitions:
        written = engine.run(prompts, num_outputs)
        _require(written, len(prompts), num_outputs)
        num_tokens += sum(map(len, prompts)) + sum(written)
    seconds = time.perf_counter() - began_s
    return {"seconds": seconds, "tokens_per_s": num_tokens / seconds}


def run_streams(
    engine: Engine, repetitions: Sequence[Sequence[Prompt]], num_outputs: int
) -> dict[str, float]:
    """Return the medians over the streams: seconds to the first token, and tokens per second from
    there on."""
    streams = [_stream(engine, prompt, num_outputs) for [prompt] in repetitions]
    firsts, rates = zip(*streams, strict=True)
    return {"first_s": median(firsts), "tokens_per_s": median(rates)}


def _stream(engine: Engine, prompt: Prompt, num_outputs: int) -> tuple[float, float]:
    began_s = time.perf_counter()
    counts, times_s = [], []
    for count in engine.stream(prompt, num_outputs):
        counts.append(count)
        times_s.append(time.perf_counter() - began_s)
    _require([sum(counts)], 1, num_outputs)
    # The first message may have several tokens.
    return times_s[0], (num_outputs - counts[0]) / (times_s[-1] - times_s[0])


def _require(written: Sequence[int], num_requests: int, num_outputs: int) -> None:
    if list(written) != [num_outputs] * num_requests:
        raise RuntimeError(f"outputs of {written} tokens instead of {num_outputs} each")
