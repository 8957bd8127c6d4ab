"""How many kernels a layer launches on a GPU when its rows decode, counted on a device without
data."""

from pathlib import Path
from typing import Any

import pytest
import torch
from dataless_device import TorchLaunches, dataless, idle_kernels
from tiny_models import FAMILIES, save_model
from worker_driver import Sequence, admit, append, schedule, worker_settings

from kernels.dispatch import interprets_triton
from quire.internal.v1 import worker_pb2
from worker_svc.loading.runner_loading import load_runner
from worker_svc.plan.plans import plan_from_proto

pytestmark = pytest.mark.skipif(
    not interprets_triton(), reason="Triton's kernels are not interpreted"
)


def launches(
    family: str, num_layers: int, folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> tuple[int, dict[str, int]]:
    """Of a step with two rows that decode: the number of all, and that of each name."""
    config = FAMILIES[family]()
    config.num_hidden_layers = num_layers
    config.layer_types = ["full_attention"] * num_layers
    loaded = load_runner(
        worker_settings(
            save_model(config, folder / f"{family}-{num_layers}"),
            device="cpu",
            dtype="float16",
            **{"kernels": "triton", **settings},
        )
    )
    with monkeypatch.context() as patch:
        kernels = idle_kernels(patch)
        runner = dataless(loaded)
        prompt, decoding = (worker_pb2.BatchPlan(step=step) for step in (1, 2))
        for row in range(2):
            admit(prompt, Sequence(row, [5, 6, 7], 3, 0, [1 + 3 * row]))
            schedule(prompt, row, 3)
            append(decoding, row, [2 + 3 * row])
            schedule(decoding, row, 1)
        runner.launch(plan_from_proto(prompt))
        before = {name: kernel.num_launches for name, kernel in kernels.items()}
        with torch.inference_mode(), TorchLaunches() as of_torch:
            runner.launch(plan_from_proto(decoding))
    own = {name: kernel.num_launches - before[name] for name, kernel in kernels.items()}
    found = {name: count for name, count in (own | of_torch.names).items() if count}
    return sum(found.values()), found


def of_a_layer(
    family: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> dict[str, int]:
    """What one more layer launches."""
    (_, fewer), (_, more) = (
        launches(family, num_layers, folder, monkeypatch, **settings) for num_layers in (2, 3)
    )
    names = fewer.keys() | more.keys()
    counts = {name: more.get(name, 0) - fewer.get(name, 0) for name in names}
    return {name: count for name, count in counts.items() if count}


_OF_A_LAYER = {
    "rms_norm_kernel": 2,
    "qk_norm_rope_kernel": 1,
    "_kv_write_kernel": 1,
    "paged_attention_kernel": 1,
    "gated_activation_kernel": 1,
    # Queries, keys and values in one, the output's, gate and up in one, and down.
    "linear": 4,
}


@pytest.mark.parametrize(("family", "num_of_torch"), [("llama", 39), ("qwen3", 55)])
def test_a_layer_launches_ten_kernels(
    family: str, num_of_torch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert of_a_layer(family, tmp_path, monkeypatch) == _OF_A_LAYER
    # Attention, writes to the cache, and torch's for the rest.
    without = of_a_layer(family, tmp_path, monkeypatch, kernels="torch")
    assert sum(without.values()) == num_of_torch


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(
    ("quantization", "products"),
    [
        ("int4", {"tiled_linear_kernel": 4}),
        # Rows are rounded to 8 bits before each product.
        ("int8", {"int8_linear_kernel": 4, "_round_rows_kernel": 4}),
    ],
)
@pytest.mark.slow
def test_a_layer_with_quantised_weights(
    family: str,
    quantization: str,
    products: dict[str, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = of_a_layer(family, tmp_path, monkeypatch, quantization=quantization)
    others = {name: count for name, count in _OF_A_LAYER.items() if name != "linear"}
    assert found == others | products


def test_a_layer_with_norms_behind_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps its code, in which the parts are replaced."""
    found = of_a_layer("gemma2", tmp_path, monkeypatch)
    assert found == {
        "rms_norm_kernel": 4,
        "rope_kernel": 1,
        "_kv_write_kernel": 1,
        "paged_attention_kernel": 1,
        "gated_activation_kernel": 1,
        "linear": 6,
        "add": 2,
    }
