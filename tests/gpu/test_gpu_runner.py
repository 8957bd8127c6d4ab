"""The runner on a GPU: graphs against steps launched anew, and both against transformers there."""

from collections import deque
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from tiny_models import FAMILIES, VOCAB_SIZE, save_model
from transformers import AutoModelForCausalLM

from benchmarks.engines.batcher import steps
from benchmarks.engines.workload import Work
from worker_svc.engine import Engine
from worker_svc.pipelined_runner import PipelinedRunner
from worker_svc.plans import plan_from_proto
from worker_svc.settings import WorkerSettings
from worker_svc.torch_engine import load_engine

_ROWS, _BUDGET, _DEPTH = 20, 64, 2
_BLOCK_SIZE, _NUM_BLOCKS = 4, 400
# Largest difference of logits to the largest of them, by rounding in another order.
_TOLERANCES = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 6e-2}


@pytest.fixture(params=sorted(FAMILIES))
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save_model(FAMILIES[request.param](), tmp_path / "model")


def loaded(model: Path, **changes: Any) -> Engine:
    values: dict[str, Any] = {
        "model": str(model),
        "device": "cuda",
        "block_size": _BLOCK_SIZE,
        "num_blocks": _NUM_BLOCKS,
        "max_num_seqs": _ROWS,
        "max_num_batched_tokens": _BUDGET,
        **changes,
    }
    return load_engine(WorkerSettings(_cli_parse_args=[], **values))


def work() -> Work:
    draw = Random(5)
    prompts = [
        [draw.randrange(VOCAB_SIZE) for _ in range(draw.choice([1, 3, 4, 8, 21, 60]))]
        for _ in range(30)
    ]
    return Work(prompts, [draw.randrange(4, 20) for _ in prompts])


def outputs(engine: Engine) -> list[list[int]]:
    """The work's tokens, each step launched before the one before has ended."""
    written: list[list[int]] = [[] for _ in work().prompts]
    waiting: deque[Any] = deque()

    def settle() -> None:
        sampling, launched = waiting.popleft()
        output = launched.output()
        assert not output.failures
        for row, token in zip(output.sampled_rows, output.sampled_token_ids, strict=True):
            written[sampling[row]].append(token)

    for step in steps(
        work(),
        max_num_seqs=_ROWS,
        max_num_batched_tokens=_BUDGET,
        block_size=engine.identity.block_size,
        num_blocks=engine.identity.num_blocks,
    ):
        waiting.append((step.sampling, engine.runner.launch(plan_from_proto(step.plan))))
        if len(waiting) == _DEPTH:
            settle()
    while waiting:
        settle()
    engine.runner.clear()
    return written


def test_tokens_are_those_of_transformers_with_graphs_and_without(model: Path) -> None:
    with capture_logs() as logs:
        with_graphs = outputs(loaded(model))
    assert not [entry for entry in logs if entry["log_level"] == "warning"]
    assert with_graphs == outputs(loaded(model, enforce_eager=True))
    network = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    )
    network.to("cuda").eval()
    for prompt, tokens in zip(work().prompts, with_graphs, strict=True):
        expected = network.generate(
            torch.tensor([prompt], device="cuda"),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device="cuda"),
            max_new_tokens=len(tokens),
            min_new_tokens=len(tokens),
            do_sample=False,
            pad_token_id=0,
        )
        assert tokens == expected[0, len(prompt) :].tolist()


def test_tokens_of_a_compiled_model_are_the_model_s(model: Path) -> None:
    with capture_logs() as logs:
        compiled = outputs(loaded(model, enable_torch_compile=True))
    assert not [entry for entry in logs if entry["log_level"] == "warning"]
    assert compiled == outputs(loaded(model))


@pytest.mark.parametrize("dtype", list(_TOLERANCES))
@pytest.mark.parametrize("num_rows", [1, 3, 16, 17])
def test_logits_of_a_graph_are_those_of_the_pass(model: Path, dtype: str, num_rows: int) -> None:
    """What the graph gives for padded rows, against the same rows launched anew."""
    runner = loaded(model, dtype=dtype).runner.runner
    assert isinstance(runner, PipelinedRunner)
    found: list[torch.Tensor] = []
    original = runner._sample

    def noted(logits: torch.Tensor | None, *rest: Any) -> Any:
        assert logits is not None
        found.append(logits.clone())
        return original(logits, *rest)

    runner._sample = noted  # type: ignore[method-assign]
    for enforce_eager in (False, True):
        if enforce_eager:
            runner._pass._graphs = type(runner._pass._graphs)({})
        plans = steps(
            Work([[row + 1, 5, 7] for row in range(num_rows)], [3] * num_rows),
            max_num_seqs=_ROWS,
            max_num_batched_tokens=_BUDGET,
            block_size=_BLOCK_SIZE,
            num_blocks=_NUM_BLOCKS,
        )
        for step in plans:
            if step.num_scheduled_tokens:
                runner.run(plan_from_proto(step.plan))
        runner.clear()
    half = len(found) // 2
    # The prompts, and the first tokens behind them: later ones follow what was sampled.
    for graph, eager in zip(found[:2], found[half : half + 2], strict=True):
        scale = eager.abs().max()
        assert (graph - eager).abs().max() <= _TOLERANCES[dtype] * scale
