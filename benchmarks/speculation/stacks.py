"""Runs that alternate, with speculation and without, on two stacks or on one."""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median, quantiles

from benchmarks.engines.host import EngineError
from benchmarks.report import Cell, Column
from quire.client.client import Client
from quire.client.operations import Operations
from quire.client.sampling_params import SamplingParams
from quire.launcher.stack import LocalStack

COLUMNS = (
    Column("text", "output"),
    Column("requests", "requests", "d"),
    Column("without", "tokens/s without", ",.0f"),
    Column("with", "with", ",.0f"),
    Column("speedup", "speed-up", ".3f"),
    Column("drafted", "drafts per token", ".2f"),
    Column("accepted", "accepted", ".0%"),
)
_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Work:
    """Requests that run at once, wave after wave, all of which write as many tokens."""

    title: str
    waves: Sequence[Sequence[list[int]]]  # prompts
    num_tokens: int
    temperature: float
    # Tokens are read as they come. Waves of one request only.
    is_streamed: bool = False

    @property
    def num_requests(self) -> int:
        """Of a wave."""
        return len(self.waves[0])

    @property
    def num_output_tokens(self) -> int:
        """Of all waves."""
        return len(self.waves) * self.num_requests * self.num_tokens

    def params(self, speculation: bool | None = None) -> list[SamplingParams]:
        return [
            SamplingParams(
                temperature=self.temperature,
                seed=seed,
                max_tokens=self.num_tokens,
                ignore_eos=True,
                speculation=speculation,
            )
            for seed in range(self.num_requests)
        ]


class Stack:
    """All services on this machine, with one worker on its CPU."""

    def __init__(self, opened: ExitStack, model: Path, settings: Mapping[str, str]) -> None:
        """`settings` are those of the worker, without their prefix."""
        of_worker = {"DTYPE": "float32", "DEVICE": "cpu", **settings}
        prefixed = {f"QUIRE_WORKER_{name}": value for name, value in of_worker.items()}
        local = opened.enter_context(LocalStack(str(model), settings=prefixed))
        self._client = opened.enter_context(Client(local.address))
        self._operations = opened.enter_context(Operations(local.scheduler_address))

    def run(self, work: Work, speculation: bool | None = None) -> tuple[float, list[list[int]]]:
        """Seconds, and what was written."""
        self._operations.reset_prefix_cache(_TIMEOUT_S)
        params = work.params(speculation)
        written: list[list[int]] = []
        began_s = time.perf_counter()
        for prompts in work.waves:
            written += self._wave(list(prompts), params, is_streamed=work.is_streamed)
        return time.perf_counter() - began_s, written

    def _wave(
        self, prompts: list[list[int]], params: list[SamplingParams], *, is_streamed: bool
    ) -> list[list[int]]:
        """What each request has written."""
        if not is_streamed:
            requests = self._client.generate_all(prompts, params)
            return [list(request.outputs[0].token_ids) for request in requests]
        [prompt] = prompts
        deltas = self._client.stream_generate(prompt, params[0])
        outputs = chain.from_iterable(delta.outputs for delta in deltas)
        return [[*chain.from_iterable(output.token_ids for output in outputs)]]

    def drafts(self) -> tuple[int, int]:
        """Proposed and accepted tokens so far."""
        [worker] = self._operations.status(False, _TIMEOUT_S).workers
        return sum(worker.num_draft_tokens), sum(worker.num_accepted_tokens)


def compare(without: Stack, speculating: Stack, work: Work, num_rounds: int) -> Mapping[str, Cell]:
    """A row of the table. EngineError if the outputs differ."""
    stacks = (without, speculating)
    if without.run(work)[1] != speculating.run(work)[1]:
        raise EngineError(f"{work.title}, {work.num_requests}: speculation changes the output")
    before = speculating.drafts()
    rounds: list[tuple[float, float]] = []
    for number in range(num_rounds):
        order = (0, 1) if number % 2 else (1, 0)
        seconds = {index: stacks[index].run(work)[0] for index in order}
        rounds.append((seconds[0], seconds[1]))
    drafted, accepted = (now - then for now, then in zip(speculating.drafts(), before, strict=True))
    total = work.num_output_tokens
    return {
        "text": work.title + (", streamed" if work.is_streamed else ""),
        "requests": work.num_requests,
        "without": median(total / one for one, _ in rounds),
        "with": median(total / one for _, one in rounds),
        "speedup": median(one / other for one, other in rounds),
        "drafted": drafted / (num_rounds * total),
        "accepted": accepted / drafted if drafted else None,
    }


def compare_within(stack: Stack, work: Work, num_rounds: int) -> dict[str, Cell]:
    """A row of the table: the requests with drafts and, by their own `speculation`, without, on the
    same processes. EngineError if the outputs differ."""
    if stack.run(work, False)[1] != stack.run(work)[1]:
        raise EngineError(f"{work.title}, {work.num_requests}: speculation changes the output")
    before = stack.drafts()
    rounds: list[tuple[float, float]] = []
    for number in range(num_rounds):
        order = (False, None) if number % 2 else (None, False)
        seconds = {speculation: stack.run(work, speculation)[0] for speculation in order}
        rounds.append((seconds[False], seconds[None]))
    drafted, accepted = (now - then for now, then in zip(stack.drafts(), before, strict=True))
    total, ratios = work.num_output_tokens, [one / other for one, other in rounds]
    low, _, high = quantiles(ratios, method="inclusive") if len(ratios) > 1 else ratios * 3
    return {
        "text": work.title,
        "requests": work.num_requests,
        "without": median(total / one for one, _ in rounds),
        "with": median(total / one for _, one in rounds),
        "speedup": median(ratios),
        "low": low,
        "high": high,
        "drafted": drafted / (num_rounds * total),
        "accepted": accepted / drafted if drafted else None,
    }
