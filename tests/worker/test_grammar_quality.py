"""Outputs that follow schemas, regular expressions and grammars, sampled at temperature 1."""

import asyncio
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from regex_cases import GRAMMARS, regexes
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig
from worker_driver import worker_settings

from benchmarks.grammars.guided_rows import GuidedRow, RowDriver
from benchmarks.grammars.schemas import kinds, mixed_schemas
from gateway_svc.structured.compiler import StructuredOutputCompiler
from quire.service.errors import RequestError
from quire.v1 import structured_output_pb2 as pb
from worker_svc.loading.runner_loading import load_runner
from worker_svc.plan.logits_params import Grammar, LogitsParams
from worker_svc.runner.step_runner import LoadedRunner

jsonschema = pytest.importorskip("jsonschema")
lark = pytest.importorskip("lark")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

DEMO = Path(__file__).resolve().parents[2] / "demo" / "model"
TOKENIZER = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
EOS = 0
# 630 schemas, 516 of kinds that are served.
NUM_SCHEMAS = 630
NUM_SEEDS = 4
MAX_TOKENS = 160
UNSUPPORTED = {
    "uniqueItems": "uniqueItems",
    "not": "not",
    "if and then": "if",
    "contains": "contains",
    "dependentRequired": "dependentRequired",
    "propertyNames": "propertyNames",
}


@pytest.fixture(scope="module", params=["demo model", "random weights"])
def loaded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> LoadedRunner:
    folder = DEMO
    if request.param == "random weights":
        folder = tmp_path_factory.mktemp("random")
        torch.manual_seed(0)
        config = LlamaConfig(
            # More than the tokenizer has.
            vocab_size=TOKENIZER.get_vocab_size() + 24,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            initializer_range=0.2,
            eos_token_id=EOS,
        )
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        shutil.copy(DEMO / "tokenizer.json", folder)
    return load_runner(worker_settings(folder, num_blocks=2500))


@pytest.fixture(scope="module")
def compiler() -> StructuredOutputCompiler:
    return StructuredOutputCompiler(TOKENIZER, TOKENIZER.get_vocab_size())


def _row(compiler: StructuredOutputCompiler, output: pb.StructuredOutput, seed: int) -> GuidedRow:
    definition = asyncio.run(compiler.compile("field", output)).definition
    params = LogitsParams(stop_token_ids=np.array([EOS]), grammar=Grammar(definition))
    return GuidedRow(TOKENIZER.encode("The value is ").ids, params, seed, MAX_TOKENS)


def _texts(loaded: LoadedRunner, rows: list[GuidedRow]) -> list[str | None]:
    """The text of each row; None if it is not finished."""
    RowDriver(loaded).run(rows)
    assert [row.failure for row in rows if row.failure] == []
    return [TOKENIZER.decode(row.output[:-1]) if row.is_finished else None for row in rows]


def test_documents_follow_their_schemas(
    loaded: LoadedRunner, compiler: StructuredOutputCompiler
) -> None:
    names = list(kinds())
    rows, schemas, refused = [], [], []
    for at, schema in enumerate(mixed_schemas(NUM_SCHEMAS)):
        output = pb.StructuredOutput(json_schema=json.dumps(schema))
        try:
            rows += [_row(compiler, output, seed=NUM_SEEDS * at + one) for one in range(NUM_SEEDS)]
        except RequestError as error:
            refused.append((names[at % len(names)], str(error)))
            continue
        schemas += [schema] * NUM_SEEDS
    for kind, reason in refused:
        assert f"the keyword {UNSUPPORTED.get(kind, 'exclusive')}" in reason
    texts = _texts(loaded, rows)
    finished = [pair for pair in zip(texts, schemas, strict=True) if pair[0] is not None]
    print(f"{len(schemas)} outputs, {len(schemas) - len(finished)} not finished")
    assert len(schemas) >= 2000
    assert len(finished) > len(schemas) / 2
    assert [pair for pair in finished if not _is_valid(*pair)] == []


def _is_valid(text: Any, schema: Any) -> bool:
    try:
        document = json.loads(text)
    except ValueError:
        return False
    return bool(jsonschema.validators.validator_for(schema)(schema).is_valid(document))


def test_texts_match_their_regular_expressions(
    loaded: LoadedRunner, compiler: StructuredOutputCompiler
) -> None:
    patterns = regexes(200)
    rows = [
        _row(compiler, pb.StructuredOutput(regex=pattern), seed)
        for seed, pattern in enumerate(patterns)
    ]
    texts = _texts(loaded, rows)
    finished = [pair for pair in zip(texts, patterns, strict=True) if pair[0] is not None]
    print(f"{len(patterns)} outputs, {len(patterns) - len(finished)} not finished")
    assert len(finished) > 100
    assert [pair for pair in finished if not re.fullmatch(pair[1], str(pair[0]))] == []


def test_texts_are_parsed_by_their_grammars(
    loaded: LoadedRunner, compiler: StructuredOutputCompiler
) -> None:
    rows = [
        _row(compiler, pb.StructuredOutput(grammar=grammar), seed=10 * at + one)
        for at, grammar in enumerate(GRAMMARS)
        for one in range(5)
    ]
    parsers = [lark.Lark(grammar, parser="earley") for grammar in GRAMMARS]
    num_finished = 0
    for at, text in enumerate(_texts(loaded, rows)):
        if text is not None:
            num_finished += 1
            parsers[at // 5].parse(text)
    print(f"{len(rows)} outputs, {len(rows) - num_finished} not finished")
    assert num_finished > len(rows) / 2
