"""The same requests with speculation and without, through all services."""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from random import Random
from statistics import median

from benchmarks.engines.host import EngineError
from benchmarks.engines.models import SMALL
from benchmarks.engines.systems import ROOT, Bench
from benchmarks.engines.workload import MAX_MODEL_LEN
from benchmarks.report import Cell, Column, Part, Target
from quire.client.client import Client
from quire.client.operations import Operations
from quire.client.sampling_params import SamplingParams
from quire.launcher.stack import LocalStack

PART = "service"
FOLDER = ROOT / ".cache/engines"
NUM_SPECULATIVE_TOKENS = 5
_PROMPT_LENGTH = 160
_TIMEOUT_S = 10.0
_LEAST_SPEEDUP, _MOST_LOSS = 1.8, 0.02


@dataclass(frozen=True)
class _Work:
    """Requests at once. Those that copy are greedy; the others are sampled at temperature 1."""

    title: str
    num_requests: int
    copies: bool

    def prompts(self) -> list[list[int]]:
        draw = Random(self.num_requests)
        return [
            [draw.randrange(SMALL.vocab_size) for _ in range(_PROMPT_LENGTH)]
            for _ in range(self.num_requests)
        ]

    def params(self, num_tokens: int) -> list[SamplingParams]:
        return [
            SamplingParams(
                temperature=0.0 if self.copies else 1.0,
                seed=seed,
                max_tokens=num_tokens,
                ignore_eos=True,
            )
            for seed in range(self.num_requests)
        ]


_WORKS = (
    _Work("repeating itself", 1, True),
    _Work("random", 1, False),
    _Work("random", 8, False),
)


class _Service:
    """A stack of its own, with the most drafts of a row."""

    def __init__(self, opened: ExitStack, num_speculative_tokens: int) -> None:
        stack = LocalStack(
            str(Bench(FOLDER, None).model_folder(SMALL)),
            settings={
                "QUIRE_WORKER_DTYPE": "float32",
                "QUIRE_WORKER_DEVICE": "cpu",
                "QUIRE_WORKER_MAX_MODEL_LEN": str(MAX_MODEL_LEN),
                "QUIRE_WORKER_KV_CACHE_MEMORY": str(SMALL.kv_cache_bytes),
                "QUIRE_WORKER_NUM_SPECULATIVE_TOKENS": str(num_speculative_tokens),
            },
        )
        local = opened.enter_context(stack)
        self._client = opened.enter_context(Client(local.address))
        self._operations = opened.enter_context(Operations(local.scheduler_address))

    def run(self, work: _Work, num_tokens: int) -> tuple[float, list[list[int]]]:
        """Seconds, and what was written."""
        self._operations.reset_prefix_cache(_TIMEOUT_S)
        prompts, params = work.prompts(), work.params(num_tokens)
        began_s = time.perf_counter()
        written = self._client.generate_all(list(prompts), params)
        seconds = time.perf_counter() - began_s
        return seconds, [list(request.outputs[0].token_ids) for request in written]

    def drafts(self) -> tuple[int, int]:
        """Proposed and accepted tokens so far."""
        [worker] = self._operations.status(False, _TIMEOUT_S).workers
        return sum(worker.num_draft_tokens), sum(worker.num_accepted_tokens)


def service(num_rounds: int, num_tokens: int) -> Part:
    """Both stacks are up all the time; their runs alternate. EngineError if their outputs
    differ."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with ExitStack() as opened:
        without, speculating = (_Service(opened, most) for most in (0, NUM_SPECULATIVE_TOKENS))
        rows = [_row(without, speculating, work, num_rounds, num_tokens) for work in _WORKS]
    return _part(rows, num_rounds, num_tokens)


def _row(
    without: _Service, speculating: _Service, work: _Work, num_rounds: int, num_tokens: int
) -> Mapping[str, Cell]:
    services = (without, speculating)
    if without.run(work, num_tokens)[1] != speculating.run(work, num_tokens)[1]:
        raise EngineError(f"{work.title}, {work.num_requests}: speculation changes the output")
    before = speculating.drafts()
    rounds: list[tuple[float, float]] = []
    for number in range(num_rounds):
        order = (0, 1) if number % 2 else (1, 0)
        seconds = {index: services[index].run(work, num_tokens)[0] for index in order}
        rounds.append((seconds[0], seconds[1]))
    drafted, accepted = (now - then for now, then in zip(speculating.drafts(), before, strict=True))
    total = work.num_requests * num_tokens
    return {
        "text": work.title,
        "requests": work.num_requests,
        "without": median(total / one for one, _ in rounds),
        "with": median(total / one for _, one in rounds),
        "speedup": median(one / other for one, other in rounds),
        "drafted": drafted / (num_rounds * total),
        "accepted": accepted / drafted if drafted else None,
    }


def _part(rows: Sequence[Mapping[str, Cell]], num_rounds: int, num_tokens: int) -> Part:
    return Part(
        name=PART,
        title="Speculative decoding by prompt lookup, 30 million parameters",
        notes=[
            f"Requests through the gateway to two stacks, with and without speculation "
            f"(`--num-speculative-tokens={NUM_SPECULATIVE_TOKENS}`): prompts of {_PROMPT_LENGTH} "
            f"random tokens, outputs of {num_tokens}, float32; medians of {num_rounds} rounds, in "
            "which the stacks alternate. Outputs of both are compared, and equal. Greedy outputs "
            "of these random weights repeat themselves after a while. At temperature 1 nothing "
            "repeats itself: there is nothing to propose, and what is measured is the price of "
            "looking for it. Ratios of the two stacks without any draft show how far the machine "
            "can distinguish them."
        ],
        columns=[
            Column("text", "output"),
            Column("requests", "requests", "d"),
            Column("without", "tokens/s without", ",.0f"),
            Column("with", "with", ",.0f"),
            Column("speedup", "speed-up", ".3f"),
            Column("drafted", "drafts per token", ".2f"),
            Column("accepted", "accepted", ".0%"),
        ],
        rows=rows,
        targets=[_target(row) for row in rows],
    )


def _target(row: Mapping[str, Cell]) -> Target:
    speedup = row["speedup"]
    assert isinstance(speedup, float)
    what = f"speed-up, {row['text']}, {row['requests']} at once"
    least = 1 - _MOST_LOSS if row["text"] == "random" else _LEAST_SPEEDUP
    return Target(what, f"at least {least:g}", f"{speedup:.3f}", speedup >= least)
