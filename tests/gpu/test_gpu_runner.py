"""The runner on a GPU: graphs against steps launched anew, and both against transformers there."""

from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from logits_jobs import NUM_JOBS, Schedule, changed_jobs, run_jobs
from structlog.testing import capture_logs
from tiny_models import FAMILIES, MIXTURES, VOCAB_SIZE, llama, save_model
from transformers import AutoModelForCausalLM

from benchmarks.engines.batcher import steps
from benchmarks.engines.workload import Work
from worker_svc.gpu.device_forward import DeviceForward
from worker_svc.gpu.device_inputs import ForwardInputs
from worker_svc.gpu.graphs import DecodeGraphs
from worker_svc.gpu.pipelined_runner import PipelinedRunner
from worker_svc.loading import model_preparation
from worker_svc.loading.runner_loading import load_runner
from worker_svc.plan.plans import plan_from_proto
from worker_svc.runner.multi_step import MultiStepRunner
from worker_svc.runner.step_runner import LoadedRunner
from worker_svc.settings import WorkerSettings

# Hundreds of tests, which need not be collected.
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

_ROWS, _BUDGET, _DEPTH = 20, 64, 2
_BLOCK_SIZE, _NUM_BLOCKS = 4, 400
# Largest difference of logits to the largest of them, by rounding in another order.
_TOLERANCES = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 6e-2}


@pytest.fixture(params=sorted(FAMILIES))
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save_model(FAMILIES[request.param](), tmp_path / "model")


@pytest.fixture
def llama_model(tmp_path: Path) -> Path:
    return save_model(llama(), tmp_path / "model")


def load(model: Path, **changes: Any) -> LoadedRunner:
    values: dict[str, Any] = {
        "model": str(model),
        "device": "cuda",
        "block_size": _BLOCK_SIZE,
        "num_blocks": _NUM_BLOCKS,
        "max_num_seqs": _ROWS,
        "max_num_batched_tokens": _BUDGET,
        **changes,
    }
    return load_runner(WorkerSettings(_cli_parse_args=[], **values))


@pytest.mark.parametrize("eager", [True, False])
def test_changed_logits_do_not_depend_on_the_schedule(llama_model: Path, eager: bool) -> None:
    """With every built-in processor."""
    loaded = load(
        llama_model, max_num_seqs=NUM_JOBS, max_num_batched_tokens=1000, enforce_eager=eager
    )
    found = []
    for how in (Schedule(), Schedule(depth=2), Schedule(chunk=3, depth=2), Schedule(num_rounds=4)):
        found.append(run_jobs(loaded.runner, changed_jobs(), how))
        loaded.runner.clear()
    assert found == found[:1] * len(found)


def work() -> Work:
    draw = Random(5)
    prompts = [
        [draw.randrange(VOCAB_SIZE) for _ in range(draw.choice([1, 3, 4, 8, 21, 60]))]
        for _ in range(30)
    ]
    return Work(prompts, [draw.randrange(4, 20) for _ in prompts])


def outputs(loaded: LoadedRunner, given: Work | None = None) -> list[list[int]]:
    """The work's tokens, each step launched before the one before has ended; no launch waits for
    the device."""
    given = given or work()
    identity = loaded.identity
    written: list[list[int]] = [[] for _ in given.prompts]
    waiting: deque[Any] = deque()

    def complete_oldest() -> None:
        sampling, launched = waiting.popleft()
        output = launched.output()
        assert not output.failures
        for row, token in zip(output.sampled_rows, output.sampled_token_ids, strict=True):
            written[sampling[row]].append(token)

    for step in steps(
        given,
        max_num_seqs=identity.max_num_seqs,
        max_num_batched_tokens=identity.max_num_batched_tokens,
        block_size=identity.block_size,
        num_blocks=identity.num_blocks,
    ):
        plan = plan_from_proto(step.plan)
        torch.cuda.set_sync_debug_mode("error")
        try:
            waiting.append((step.sampling, loaded.runner.launch(plan)))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if len(waiting) == _DEPTH:
            complete_oldest()
    while waiting:
        complete_oldest()
    loaded.runner.clear()
    return written


def test_tokens_are_those_of_transformers_with_graphs_and_without(model: Path) -> None:
    with capture_logs() as logs:
        with_graphs = outputs(load(model))
    assert not [entry for entry in logs if entry["log_level"] == "warning"]
    assert with_graphs == outputs(load(model, enforce_eager=True))
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


def test_more_rows_than_the_largest_graph_has(llama_model: Path) -> None:
    """600 rows, which become fewer: those of the largest graph, and of smaller ones."""
    limits = {"max_num_seqs": 600, "max_num_batched_tokens": 2048, "num_blocks": 6000}
    many = Work(
        [[row % 200, row // 200] for row in range(600)], [3 + row % 5 for row in range(600)]
    )
    expected = outputs(load(llama_model, enforce_eager=True, **limits), many)
    assert outputs(load(llama_model, **limits), many) == expected


def test_a_model_that_cannot_be_recorded_has_its_steps_launched_anew(
    llama_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = outputs(load(llama_model))
    decode = DeviceForward._decode

    def waiting(self: DeviceForward, inputs: ForwardInputs, size: int) -> None:
        decode(self, inputs, size)
        inputs.seq_lens.sum().item()

    monkeypatch.setattr(DeviceForward, "_decode", waiting)
    with capture_logs() as logs:
        loaded = load(llama_model)
    [warning] = [entry for entry in logs if entry["log_level"] == "warning"]
    assert "synchronizing" in warning["reason"]
    assert outputs(loaded) == expected


@dataclass(frozen=True)
class Logits:
    """Of a step's sampling rows, in the order of steps."""

    runner: PipelinedRunner
    found: list[torch.Tensor]

    @classmethod
    def of(cls, loaded: LoadedRunner) -> "Logits":
        assert isinstance(loaded.runner, MultiStepRunner)
        runner = loaded.runner.runner
        assert isinstance(runner, PipelinedRunner)
        logits = cls(runner, [])
        original = runner._sample

        def noted(found: torch.Tensor | None, *rest: Any) -> Any:
            assert found is not None
            logits.found.append(found.clone())
            return original(found, *rest)

        runner._sample = noted  # type: ignore[method-assign]
        return logits

    def steps(self, num_rows: int) -> list[torch.Tensor]:
        """Of the prompts, and of the first tokens behind them: later ones follow what was
        sampled."""
        self.found.clear()
        for step in steps(
            Work([[row + 1, 5, 7] for row in range(num_rows)], [3] * num_rows),
            max_num_seqs=_ROWS,
            max_num_batched_tokens=_BUDGET,
            block_size=_BLOCK_SIZE,
            num_blocks=_NUM_BLOCKS,
        ):
            if step.num_scheduled_tokens:
                self.runner.launch(plan_from_proto(step.plan)).output()
        self.runner.clear()
        return self.found[:2]


def assert_near(found: list[torch.Tensor], others: list[torch.Tensor], tolerance: float) -> None:
    for one, other in zip(found, others, strict=True):
        assert (one - other).abs().max() <= tolerance * other.abs().max()


@pytest.mark.parametrize("dtype", list(_TOLERANCES))
@pytest.mark.parametrize("num_rows", [1, 3, 16, 17])
def test_logits_of_a_graph_are_those_of_the_pass(model: Path, dtype: str, num_rows: int) -> None:
    """What the graph gives for padded rows, against the same rows launched anew."""
    check_graphs(load(model, dtype=dtype), num_rows, _TOLERANCES[dtype])


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_logits_of_a_graph_on_a_cache_of_8_bits(llama_model: Path, kv_cache_dtype: str) -> None:
    loaded = load(llama_model, dtype="bfloat16", kv_cache_dtype=kv_cache_dtype)
    check_graphs(loaded, 3, _TOLERANCES["bfloat16"])


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_of_a_graph_of_quantised_weights(
    llama_model: Path, quantization: str, dtype: str
) -> None:
    with capture_logs() as logs:
        loaded = load(llama_model, dtype=dtype, quantization=quantization)
    assert not [entry for entry in logs if entry["log_level"] == "warning"]
    check_graphs(loaded, 3, _TOLERANCES[dtype])


@pytest.mark.parametrize("family", sorted(MIXTURES))
def test_logits_of_a_graph_of_experts(family: str, tmp_path: Path) -> None:
    """In the type in which torch need not ask how many tokens each of them has."""
    config = MIXTURES[family]()
    # Rows of a multiple of 16 bytes.
    config.hidden_size, config.intermediate_size, config.head_dim = 64, 64, 16
    with capture_logs() as logs:
        loaded = load(save_model(config, tmp_path / "experts"), dtype="bfloat16")
    assert not [entry for entry in logs if entry["log_level"] == "warning"]
    check_graphs(loaded, 3, _TOLERANCES["bfloat16"])


def check_graphs(loaded: LoadedRunner, num_rows: int, tolerance: float) -> None:
    logits = Logits.of(loaded)
    with_graphs = logits.steps(num_rows)
    logits.runner._forward._graphs = DecodeGraphs({})
    assert_near(with_graphs, logits.steps(num_rows), tolerance)


# What kernels replace in three layers, by family.
_REPLACED = {
    "llama": {"layers in one call": 3, "norms": 7, "gated products": 3},
    "qwen3": {"layers in one call": 3, "norms": 13, "gated products": 3},
    "gemma2": {"rotations": 3, "norms": 13, "gated products": 3},
}


@pytest.mark.parametrize("dtype", list(_TOLERANCES))
@pytest.mark.parametrize("family", sorted(_REPLACED))
def test_replaced_parts_round_no_more_than_the_model_s_own_code(
    family: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By their distance from the logits in float32."""
    model = save_model(FAMILIES[family](), tmp_path / "model")
    with capture_logs() as logs:
        replaced = load(model, dtype=dtype)
    assert not [entry for entry in logs if entry["log_level"] == "warning"]
    [counts] = [entry for entry in logs if entry["event"] == "kernels"]
    assert _REPLACED[family].items() <= counts.items()
    monkeypatch.setattr(model_preparation, "_replace_on_device", lambda *_: Counter())
    kinds = [Logits.of(each) for each in (replaced, load(model, dtype=dtype), load(model))]
    for num_rows in (1, 17):
        # Those of the prompts: tokens behind them follow what was sampled.
        found, own, exact = (logits.steps(num_rows)[0] for logits in kinds)
        if dtype == "float32":
            assert_near([found], [exact], _TOLERANCES[dtype])
        else:
            assert (found - exact).norm() <= 1.5 * (own - exact).norm()


def test_logits_of_a_compiled_model_are_the_model_s(model: Path) -> None:
    with capture_logs() as logs:
        compiled = load(model, enable_torch_compile=True)
    assert not [entry for entry in logs if entry["log_level"] == "warning"]
    for num_rows in (1, 17):
        own = Logits.of(load(model)).steps(num_rows)
        assert_near(Logits.of(compiled).steps(num_rows), own, _TOLERANCES["float32"])
