"""A model compiled by torch: what it writes, that nothing is compiled while it serves, and what is
said where it cannot be."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from host_device import HostCapturer, pipelined
from tiny_models import FAMILIES, MIXTURES, llama, save_model
from worker_driver import BLOCK_SIZE, worker_settings, written_by

from benchmarks.engines.workload import Work
from kernels.attention import PagedBatch
from kernels.dispatch import choose, interprets_triton
from worker_svc.errors import WrongSettingError
from worker_svc.loading.model_preparation import prepare_model
from worker_svc.loading.runner_loading import load_runner
from worker_svc.model import torch_compile
from worker_svc.model.load_progress import LoadProgress
from worker_svc.model.loading import LoadedModel
from worker_svc.model.paged_attention import PagedAttention
from worker_svc.model.torch_compile import attention_operation, compile_model
from worker_svc.runner.step_runner import LoadedRunner, StepRunner

_LIMITS = {"block_size": BLOCK_SIZE, "num_blocks": 100, "max_num_seqs": 5}
_BUDGET = 20
# Whole steps of prompts, prompts beside decoding rows, a row alone.
_WORK = Work([[5, 6, 7], [*range(8, 17)], [3], [4, 4], [1] * 15], [4, 3, 4, 2, 9])


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What is compiled stays with the process otherwise."""
    yield
    torch.compiler.reset()


def load(model: Path, **changes: Any) -> LoadedRunner:
    values = {"kernels": "torch", "max_num_batched_tokens": _BUDGET, **_LIMITS, **changes}
    return load_runner(worker_settings(model, device="cpu", **values))


def written(runner: StepRunner) -> list[list[int]]:
    return written_by(runner, _WORK, max_num_batched_tokens=_BUDGET, **_LIMITS)


def compiled_by(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_compile, "compile_model", partial(compile_model, backend=backend))


@pytest.mark.parametrize(
    ("family", "capturer"),
    [
        pytest.param("llama", HostCapturer, marks=pytest.mark.slow),
        *(
            pytest.param(family, None, marks=pytest.mark.slow)
            for family in sorted(FAMILIES | MIXTURES)
        ),
    ],
)
def test_tokens_are_the_model_s_and_nothing_is_compiled_after_loading(
    family: str,
    capturer: Callable[[], HostCapturer] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Traced, and run as it was traced."""
    model = save_model((FAMILIES | MIXTURES)[family](), tmp_path)
    expected = written(load(model).runner)
    compiled_by("eager", monkeypatch)
    loaded = load(model, enable_torch_compile=True)
    with torch.compiler.set_stance("fail_on_recompile"):
        runner = loaded.runner if capturer is None else pipelined(loaded, capturer())
        assert written(runner) == expected
    assert len({tuple(tokens) for tokens in expected}) == len(expected)


@pytest.mark.slow
def test_tokens_of_compiled_code(tmp_path: Path) -> None:
    model = save_model(llama(), tmp_path)
    expected = written(load(model).runner)
    loaded = load(model, enable_torch_compile=True)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert written(pipelined(loaded, HostCapturer())) == expected


@pytest.mark.skipif(not interprets_triton(), reason="Triton's kernels are not interpreted")
def test_kernels_of_a_gpu_replace_nothing_that_is_compiled(tmp_path: Path) -> None:
    model = save_model(llama(), tmp_path)
    for is_compiled in (True, False):
        settings = worker_settings(
            model, device="cpu", kernels="triton", enable_torch_compile=is_compiled
        )
        network: Any = prepare_model(settings, torch.device("cpu"), LoadProgress()).model.network
        replaced = [module for module in network.modules() if "forward" in vars(module)]
        assert bool(replaced) != is_compiled


def test_the_operation_passes_all_arguments() -> None:
    torch.manual_seed(0)
    caches = torch.randn(2, 2, 3, 4, 2, 8)
    # By layer and by keys and values.
    own_caches, other_caches = caches.clone(), caches.clone()
    own, other = (
        PagedAttention([(key, value) for key, value in each], choose("cpu", ()))
        for each in (own_caches, other_caches)
    )
    batch = PagedBatch(
        block_table=torch.tensor([[1, 2]], dtype=torch.int32),
        query_start_loc=torch.tensor([0, 5]),
        seq_lens=torch.tensor([6]),
        block_size=4,
        max_query_len=5,
        max_seq_len=6,
    )
    operation = attention_operation(other)
    for attention in (own, other):
        attention.set_batch(batch, torch.arange(5, 10))
    named = {"scaling": 0.3, "sliding_window": 3, "softcap": 2.0, "s_aux": torch.randn(4)}
    for _ in range(2):
        query, (key, value) = torch.randn(1, 4, 5, 8), torch.randn(2, 1, 2, 5, 8)
        expected, _ = own(None, query, key, value, None, **named)
        attended, _ = operation(torch.nn.Module(), query, key, value, None, **named)
        assert attended.equal(expected)
    assert own_caches.equal(other_caches)
    assert not own_caches.equal(caches)


@pytest.mark.slow
def test_a_model_that_torch_cannot_compile_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_broken(model: LoadedModel, *args: Any) -> None:
        layer = model.network.base_model.layers[1]
        original = layer.mlp.forward

        def asks(states: torch.Tensor) -> torch.Tensor:
            return original(states) if states.sum().item() else states

        layer.mlp.forward = asks
        compile_model(model, *args, backend="eager")

    monkeypatch.setattr(torch_compile, "compile_model", compile_broken)
    model = save_model(llama(), tmp_path)
    with pytest.raises(
        WrongSettingError, match=r"LlamaForCausalLM: .*data-dependent.*; do without it"
    ):
        load(model, enable_torch_compile=True)


def test_kernels_in_c_plus_plus_leave_nothing_to_compile(tmp_path: Path) -> None:
    model = save_model(llama(), tmp_path)
    with pytest.raises(WrongSettingError, match=r"cpp-portable.*set --kernels=torch"):
        load(model, kernels="cpp-portable", enable_torch_compile=True)
