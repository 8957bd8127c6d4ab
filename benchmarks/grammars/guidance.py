"""The price of structured output on the worker: guided rows, and a new schema beside other rows."""

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from benchmarks.engines.make_model import make_model
from benchmarks.engines.models import SMALL
from benchmarks.grammars.guided_rows import GuidedRow, RowDriver
from benchmarks.grammars.schemas import mixed_schemas
from benchmarks.report import Column, Part, Target
from gateway_svc.structured.json_schemas import to_definition
from worker_svc.loading.runner_loading import load_runner
from worker_svc.plan.logits_params import Grammar, LogitsParams
from worker_svc.runner.step_runner import LoadedRunner
from worker_svc.settings import WorkerSettings

_NUM_ROWS = 32
_NUM_TOKENS = 96
_PROMPT = "The records of the last year, as JSON: "
_MAX_LOSS = 0.05
_MAX_DELAY_MS = 10.0
_NUM_LOOKAHEAD = 16
# An id that no document has, so that guided rows reach their lengths.
_STOP = np.array([0])


class Guidance:
    """The 30m model on the runner of this machine."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        make_model(SMALL, folder)
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        settings = [
            *("--model", str(folder), "--dtype", "float32", "--device", "cpu"),
            *("--max-model-len", "1024", "--max-num-seqs", "80"),
            *("--kv-cache-memory", str(SMALL.kv_cache_bytes)),
        ]
        self._loaded: LoadedRunner = load_runner(WorkerSettings.load(settings))
        self._driver = RowDriver(self._loaded)

    def throughput(self, rounds: int) -> Part:
        """Guided rows against free ones of the same lengths, a step of each in alternation."""
        schemas = [_long(schema) for schema in mixed_schemas(_NUM_ROWS * 2) if _is_bounded(schema)]
        definitions = [to_definition(schema) for schema in schemas[:_NUM_ROWS]]
        self._step_ms(definitions)
        measured = [self._step_ms(definitions) for _ in range(rounds)]
        free = [median(pair.free) for pair in measured]
        guided = [median(pair.guided) for pair in measured]
        ratio = median(f / g for f, g in zip(free, guided, strict=True))
        loss = 1 - ratio
        return Part(
            name="guidance",
            title="Guided rows, 30 million parameters",
            notes=[
                f"{_NUM_ROWS} rows of {_NUM_TOKENS} tokens at temperature 1 on the worker's "
                f"runner, without services and jumps; {rounds} rounds. Every guided row follows "
                "another schema: arrays too long to end. A step of the free rows and one of the "
                "guided rows alternate, so that both meet the same load; the median step of each "
                "round counts.",
            ],
            columns=[
                Column("rows", "rows"),
                Column("speed", "tokens/s", ",.0f"),
                Column("step_ms", "step ms, median", ".2f"),
                Column("fastest", "fastest round", ".2f"),
                Column("slowest", "slowest", ".2f"),
                Column("ratio", "tokens/s of free rows'", ".3f"),
            ],
            rows=[_speeds("free", free, None), _speeds("guided by schemas", guided, ratio)],
            targets=[Target("loss", f"at most {_MAX_LOSS:.0%}", f"{loss:.1%}", loss <= _MAX_LOSS)],
        )

    def delay(self, rounds: int) -> Part:
        """The step in which a row with a new schema is admitted, beside 16 free rows."""
        sizes = {"none": 0, "10 properties": 10, "100 properties": 100, "500 properties": 500}
        times: dict[str, list[float]] = {name: [] for name in sizes}
        for at in range(rounds):
            for name, size in sizes.items():
                schema = new_schema(size, at) if size else None
                times[name].append(self._admission_ms(schema))
        base = median(times["none"])
        rows: list[dict[str, Any]] = [
            {
                "schema": name,
                "bytes": len(json.dumps(new_schema(sizes[name], 0))) if sizes[name] else 0,
                "step_ms": median(values),
                "delay_ms": median(values) - base,
            }
            for name, values in times.items()
        ]
        delay = float(rows[2]["delay_ms"])
        return Part(
            name="delay",
            title="A new schema beside other rows, 30 million parameters",
            notes=[
                "The step that admits a row with a schema that the worker has not seen, and "
                "computes its prompt beside 16 rows that decode: the plan arrives when the step "
                "starts. The row may wait for its grammar, so the compilation takes processor time "
                f"alone. Medians of {rounds} rounds.",
            ],
            columns=[
                Column("schema", "new schema"),
                Column("bytes", "bytes", ",d"),
                Column("step_ms", "step ms", ".1f"),
                Column("delay_ms", "delay ms", ".1f"),
            ],
            rows=rows,
            targets=[
                Target(
                    "delay by a schema of 100 properties",
                    f"at most {_MAX_DELAY_MS:.0f} ms",
                    f"{delay:.1f} ms",
                    delay <= _MAX_DELAY_MS,
                )
            ],
        )

    def _row(self, definition: str | None, seed: int) -> GuidedRow:
        params = None
        if definition is not None:
            params = LogitsParams(stop_token_ids=_STOP, grammar=Grammar(definition))
        prompt = self._tokenizer.encode(_PROMPT).ids
        return GuidedRow(prompt, params, seed, _NUM_TOKENS, stops=False)

    def _step_ms(self, definitions: Sequence[str]) -> "_StepTimes":
        """Milliseconds of each step of free and of guided rows."""
        free = {at: self._row(None, at) for at in range(_NUM_ROWS)}
        guided = {
            _NUM_ROWS + at: self._row(definition, at) for at, definition in enumerate(definitions)
        }
        for index, row in {**free, **guided}.items():
            self._driver.start(index, row)
        times = _StepTimes([], [])
        while any(not row.has_ended for row in free.values()):
            times.free.append(self._timed_ms(free))
            times.guided.append(self._timed_ms(guided))
        self._driver.release([*free, *guided])
        if failures := [row.failure for row in guided.values() if row.failure]:
            raise RuntimeError(failures[0].message)
        return times

    def _timed_ms(self, rows: Mapping[int, GuidedRow]) -> float:
        started_s = time.perf_counter()
        self._driver.step(rows)
        return 1000 * (time.perf_counter() - started_s)

    def _admission_ms(self, schema: dict[str, Any] | None) -> float:
        rows = {at: self._row(None, at) for at in range(16)}
        for index, row in rows.items():
            self._driver.start(index, row)
        for _ in range(4):
            self._driver.step(rows)
        # As schedulers plan it: a row with look-ahead waits while others go on.
        driver = RowDriver(self._loaded, _NUM_LOOKAHEAD)
        new = self._row(None if schema is None else to_definition(schema), seed=99)
        started_s = time.perf_counter()
        driver.start(len(rows), new, beside=rows)
        milliseconds = 1000 * (time.perf_counter() - started_s)
        while schema is not None and not new.output:
            driver.step({len(rows): new})
        driver.release([*rows, len(rows)])
        return milliseconds


@dataclass(frozen=True)
class _StepTimes:
    free: list[float]
    guided: list[float]


def _speeds(name: str, steps_ms: list[float], ratio: float | None) -> dict[str, Any]:
    return {
        "rows": name,
        "speed": 1000 * _NUM_ROWS / median(steps_ms),
        "step_ms": median(steps_ms),
        "fastest": min(steps_ms),
        "slowest": max(steps_ms),
        "ratio": ratio,
    }


def _is_bounded(schema: dict[str, Any]) -> bool:
    """Whether the library serves the schema within an array."""
    text = json.dumps(schema)
    names = ("$ref", "oneOf", "not", "uniqueItems", "contains", "dependent", "propertyNames")
    return not any(f'"{name}' in text for name in (*names, 'if"'))


def _long(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": schema, "minItems": 1000}


def new_schema(num_properties: int, number: int) -> dict[str, Any]:
    # Some ranges of numbers are refused.
    leaves = [leaf for leaf in mixed_schemas(10, seed=number) if leaf.get("type") != "number"]
    properties = {f"field_{number}_{at}": leaves[at % len(leaves)] for at in range(num_properties)}
    required = list(properties)[::2]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
