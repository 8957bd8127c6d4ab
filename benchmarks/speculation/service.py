"""Prompt lookup: the same requests with speculation and without, through all services."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from random import Random

from benchmarks.engines.models import SMALL
from benchmarks.engines.systems import ROOT, Bench
from benchmarks.engines.workload import MAX_MODEL_LEN
from benchmarks.report import Cell, Part, Target
from benchmarks.speculation.stacks import COLUMNS, Stack, Work, compare

PART = "service"
FOLDER = ROOT / ".cache/engines"
NUM_SPECULATIVE_TOKENS = 5
_PROMPT_LENGTH = 160
_LEAST_SPEEDUP, _MOST_LOSS = 1.8, 0.02


def service(num_rounds: int, num_tokens: int) -> Part:
    """Both stacks are up all the time; their runs alternate. EngineError if their outputs
    differ."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with ExitStack() as opened:
        without, speculating = (_stack(opened, most) for most in (0, NUM_SPECULATIVE_TOKENS))
        rows = [
            compare(without, speculating, work, num_rounds)
            for work in (
                _work("repeating itself", 1, 0.0, num_tokens),
                _work("random", 1, 1.0, num_tokens),
                _work("random", 8, 1.0, num_tokens),
            )
        ]
    return _part(rows, num_rounds, num_tokens)


def _stack(opened: ExitStack, num_speculative_tokens: int) -> Stack:
    settings = {
        "MAX_MODEL_LEN": str(MAX_MODEL_LEN),
        "KV_CACHE_MEMORY": str(SMALL.kv_cache_bytes),
        "NUM_SPECULATIVE_TOKENS": str(num_speculative_tokens),
    }
    return Stack(opened, Bench(FOLDER, None).model_folder(SMALL), settings)


def _work(title: str, num_requests: int, temperature: float, num_tokens: int) -> Work:
    draw = Random(num_requests)
    prompts = [
        [draw.randrange(SMALL.vocab_size) for _ in range(_PROMPT_LENGTH)]
        for _ in range(num_requests)
    ]
    return Work(title, [prompts], num_tokens, temperature)


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
        columns=COLUMNS,
        rows=rows,
        targets=[_target(row) for row in rows],
    )


def _target(row: Mapping[str, Cell]) -> Target:
    speedup = row["speedup"]
    assert isinstance(speedup, float)
    what = f"speed-up, {row['text']}, {row['requests']} at once"
    least = 1 - _MOST_LOSS if row["text"] == "random" else _LEAST_SPEEDUP
    return Target(what, f"at least {least:g}", f"{speedup:.3f}", speedup >= least)
