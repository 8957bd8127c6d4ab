"""A draft model: the demo model with its student and without, through all services."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.engines.systems import ROOT
from benchmarks.report import Cell, Part, Target
from benchmarks.speculation.stacks import COLUMNS, Stack, Work, compare
from demo.evaluate import PROMPTS

PART = "draft-model"
NUM_SPECULATIVE_TOKENS = 5
TEACHER = ROOT / "demo/model"
STUDENT = ROOT / ".cache/demo-student"
# Does nothing where the folder has a student of the same recipe.
_TRAINER = [sys.executable, "-m", "demo.student", "--keep", "--folder"]
_TEMPERATURE = 0.8
_NUM_WAVES = 4
_LEAST_SPEEDUP, _MOST_LOSS = 1.3, 0.02


def draft_model(num_rounds: int, num_tokens: int) -> Part:
    """The student is trained if there is none. EngineError if the outputs differ."""
    subprocess.run([*_TRAINER, str(STUDENT)], cwd=ROOT, check=True)
    prompts = _prompts()
    with ExitStack() as opened:
        without, speculating = (_stack(opened, draft) for draft in (None, STUDENT))
        rows = [
            compare(without, speculating, work, num_rounds)
            for work in (
                _work("greedy", prompts, 1, num_tokens, 0.0, is_streamed=True),
                _work("sampled", prompts, 1, num_tokens, _TEMPERATURE, is_streamed=True),
                _work("sampled", prompts, 1, num_tokens, _TEMPERATURE),
                _work("sampled", prompts, 4, num_tokens, _TEMPERATURE),
                _work("sampled", prompts, 32, num_tokens, _TEMPERATURE),
            )
        ]
    return _part(rows, json.loads((STUDENT / "TRAINING.json").read_text()), num_rounds, num_tokens)


def _stack(opened: ExitStack, draft: Path | None) -> Stack:
    settings = {"KV_CACHE_MEMORY": "128MiB"}
    if draft is not None:
        settings["SPECULATIVE_MODEL"] = str(draft)
        settings["NUM_SPECULATIVE_TOKENS"] = str(NUM_SPECULATIVE_TOKENS)
    return Stack(opened, TEACHER, settings)


def _prompts() -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(TEACHER / "tokenizer.json"))
    return [encoding.ids for encoding in tokenizer.encode_batch_fast(list(PROMPTS))]


def _work(
    title: str,
    prompts: list[list[int]],
    num_requests: int,
    num_tokens: int,
    temperature: float,
    *,
    is_streamed: bool = False,
) -> Work:
    """One wave, or one request after another."""
    num_waves = _NUM_WAVES if num_requests == 1 else 1
    starts = range(0, num_waves * num_requests, num_requests)
    waves = [prompts[start : start + num_requests] for start in starts]
    return Work(title, waves, num_tokens, temperature, is_streamed)


def _part(
    rows: Sequence[Mapping[str, Cell]],
    training: Mapping[str, Any],
    num_rounds: int,
    num_tokens: int,
) -> Part:
    agreement, recipe = training["agreement"], training["recipe"]
    return Part(
        name=PART,
        title="Speculative decoding by a draft model, the demo model and its student",
        notes=[
            f"The demo model (3.5 million parameters) in two stacks, without a draft model and "
            f"with its student (`--num-speculative-tokens={NUM_SPECULATIVE_TOKENS}`), float32: the "
            f"first prompts of the demo's evaluation, outputs of {num_tokens} tokens that ignore "
            f"EOS, sampled at temperature {_TEMPERATURE:g}. One request at once means {_NUM_WAVES} "
            "requests one after another. Tokens of streamed requests are read as they come, so "
            "each step has a plan of its own; other requests have several rounds in a plan. "
            f"Medians of {num_rounds} rounds, in which the stacks alternate. Outputs of both are "
            "compared, and equal.",
            f"The student has {training['parameters'] / 1e6:.1f} million parameters in "
            f"{recipe['num_layers']} layer, and was trained in {training['duration_s']} s on one "
            f"thread. In texts of the demo model it agrees with {agreement['greedy']:.0%} of the "
            f"greedy tokens, and with {agreement['sampled']:.0%} of those sampled at temperature "
            f"{_TEMPERATURE:g} with the same noise. Rows of a step share 12 tokens, so 4 rows have "
            "fewer drafts, and 32 have none: that line is the price of the draft model's cache. A "
            "pass for the drafts of one row takes nearly as long as one for all of them.",
        ],
        columns=COLUMNS,
        rows=rows,
        targets=[
            _target(row) for row in rows if "streamed" in str(row["text"]) or row["requests"] != 1
        ],
    )


def _target(row: Mapping[str, Cell]) -> Target:
    speedup = row["speedup"]
    assert isinstance(speedup, float)
    what = f"draft model: speed-up, {row['text']}, {row['requests']} at once"
    least = _LEAST_SPEEDUP if row["requests"] == 1 else 1 - _MOST_LOSS
    return Target(what, f"at least {least:g}", f"{speedup:.3f}", speedup >= least)
