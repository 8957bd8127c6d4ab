"""Prompt lookup: the same requests with drafts and without, through all services."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random

from tokenizers import Tokenizer

from benchmarks.engines.models import LARGE, SMALL, BenchModel
from benchmarks.engines.systems import ROOT, Bench
from benchmarks.engines.workload import MAX_MODEL_LEN
from benchmarks.report import Cell, Column, Part, Target
from benchmarks.speculation.stacks import COLUMNS, Stack, Work, compare_within
from benchmarks.speculation.vllm import Vllm

PART = "prompt-lookup"
FOLDER = ROOT / ".cache/engines"
NUM_SPECULATIVE_TOKENS = 5
_DEMO = ROOT / "demo/model"
# What the demo model is asked to continue.
_REPEATED = "def first(values):\n    return values[0]\n\n\n" * 8
_PROMPT_LENGTH = 160
_UNIT_LENGTH = 8
# Of outputs that are copied: the prompt's time is the same with drafts and without.
_NUM_COPIED_TOKENS = 400
_NUM_AT_ONCE = (1, 8, 64)
_LEAST_SPEEDUP, _MOST_LOSS = 1.8, 0.02


def prompt_lookup(num_rounds: int, num_tokens: int, vllm: Vllm | None) -> Part:
    """One stack per model, one after the other; requests with drafts and without alternate on it.
    EngineError if their outputs differ."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    copying = [
        (_DEMO, "128MiB", _copying_work("copied, demo model", _demo_prompt())),
        (
            _folder(LARGE),
            str(LARGE.kv_cache_bytes),
            _copying_work("repeated, 110 million", _repeated_prompt()),
        ),
    ]
    rows: list[Mapping[str, Cell]] = []
    for model, cache, work in copying:
        rows += _rows(model, cache, [work], num_rounds)
        if vllm is not None:
            rows.append(vllm.row(model, work, NUM_SPECULATIVE_TOKENS, num_rounds))
    random = [_random_work(count, num_tokens) for count in _NUM_AT_ONCE]
    rows += _rows(_folder(SMALL), str(SMALL.kv_cache_bytes), random, num_rounds)
    return _part(rows, num_rounds, num_tokens)


def _rows(
    model: Path, cache: str, works: Sequence[Work], num_rounds: int
) -> Iterator[Mapping[str, Cell]]:
    settings = {
        "MAX_MODEL_LEN": str(MAX_MODEL_LEN),
        "KV_CACHE_MEMORY": cache,
        "NUM_SPECULATIVE_TOKENS": str(NUM_SPECULATIVE_TOKENS),
    }
    with ExitStack() as opened:
        stack = Stack(opened, model, settings)
        for work in works:
            yield compare_within(stack, work, num_rounds)


def _folder(model: BenchModel) -> Path:
    return Bench(FOLDER, None).model_folder(model)


def _demo_prompt() -> list[int]:
    ids: list[int] = Tokenizer.from_file(str(_DEMO / "tokenizer.json")).encode(_REPEATED).ids
    return ids


def _repeated_prompt() -> list[int]:
    draw = Random(0)
    unit = [draw.randrange(LARGE.vocab_size) for _ in range(_UNIT_LENGTH)]
    return unit * (_PROMPT_LENGTH // _UNIT_LENGTH)


def _copying_work(title: str, prompt: list[int]) -> Work:
    return Work(title, [[prompt]], _NUM_COPIED_TOKENS, 0.0)


def _random_work(num_requests: int, num_tokens: int) -> Work:
    draw = Random(num_requests)
    prompts = [
        [draw.randrange(SMALL.vocab_size) for _ in range(_PROMPT_LENGTH)]
        for _ in range(num_requests)
    ]
    return Work("random, 30 million", [prompts], num_tokens, 1.0)


def _part(rows: Sequence[Mapping[str, Cell]], num_rounds: int, num_tokens: int) -> Part:
    return Part(
        name=PART,
        title="Speculative decoding by prompt lookup",
        notes=[
            f"Requests through the gateway to one stack with `--num-speculative-tokens="
            f"{NUM_SPECULATIVE_TOKENS}`, with drafts and with `speculation` false: outputs of "
            f"{num_tokens} tokens, copied ones of {_NUM_COPIED_TOKENS}, float32; medians of "
            f"{num_rounds} rounds, in which both alternate, and quartiles of the rounds' ratios. "
            "Outputs of both are compared, and equal. *Copied*: the demo model continues code that "
            "repeats itself, greedily. *Repeated*: a random model of 110 million parameters, "
            f"greedy, with a prompt that is {_UNIT_LENGTH} tokens again and again. *Random*: "
            f"prompts of {_PROMPT_LENGTH} random tokens, temperature 1: there is nothing to "
            "propose, and what is measured is the price of looking for it. vLLM: `LLM.generate`, "
            "eager, in two processes, one after the other."
        ],
        columns=[
            *COLUMNS[:5],
            Column("low", "from", ".3f"),
            Column("high", "to", ".3f"),
            *COLUMNS[5:],
        ],
        rows=rows,
        targets=[target for row in rows if (target := _target(row)) is not None],
    )


def _target(row: Mapping[str, Cell]) -> Target | None:
    """None for another engine."""
    text, speedup = str(row["text"]), row.get("speedup")
    if "vLLM" in text or not isinstance(speedup, float):
        return None
    least = 1 - _MOST_LOSS if text.startswith("random") else _LEAST_SPEEDUP
    what = f"speed-up, {text}, {row['requests']} at once"
    return Target(what, f"at least {least:g}", f"{speedup:.3f}", speedup >= least)
