"""Checkpoints that GPTQModel and AutoAWQ write stand for the weights that these libraries compute.

A few weights are recorded. Whole checkpoints are written on the spot, if the libraries are
installed.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from library_model import PROMPT
from safetensors import safe_open
from safetensors.torch import load_file
from tiny_models import Reference
from transformers import AutoConfig, AutoModelForCausalLM
from worker_driver import Driver, LaneClient, Sequence, served_model

from kernels.dispatch import Implementation
from worker_svc.model.loading import load_model
from worker_svc.model.quantized.checkpoint_tensors import CheckpointTensors
from worker_svc.model.quantized.formats import find_weights
from worker_svc.model.quantized.layer_classes import LayerClasses
from worker_svc.model.quantized.packing import pack_quantized

_ROOT = Path(__file__).parents[2]
_RECORDS = sorted((Path(__file__).parent / "library_weights").glob("*.safetensors"))
# By the environment's folder in `.cache`, the program that writes checkpoints.
_LIBRARIES = {"gptqmodel": "write_with_gptqmodel.py", "autoawq": "write_with_autoawq.py"}


@pytest.mark.parametrize("record", _RECORDS, ids=lambda path: path.stem)
def test_recorded_weights(record: Path) -> None:
    with safe_open(record, framework="pt") as file:
        config = json.loads(file.metadata()["quantization_config"])
        expected = file.get_tensor("expected")
    weight = find_weights(config, CheckpointTensors([record]), LayerClasses())["layer"].read()
    assert (weight.permutation is not None) == bool(config.get("desc_act"))
    # The libraries multiply in float16: the same products, rounded.
    assert weight.dequantize().half().equal(expected)


def test_weights_of_both_libraries_are_recorded() -> None:
    libraries = set()
    for record in _RECORDS:
        with safe_open(record, framework="pt") as file:
            libraries.add(file.metadata()["library"].split()[0])
    assert libraries == set(_LIBRARIES)


@pytest.fixture(scope="module", params=sorted(_LIBRARIES))
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The checkpoints of a library, and in `expected` of each the model that it stands for."""
    library: str = request.param
    environment = _ROOT / ".cache" / library
    if not (environment / ".installed").exists():
        pytest.skip(f"{library} is not installed; `make quantizers` does this")
    folder = tmp_path_factory.mktemp(library)
    # OpenMP's threads would spin on the cores that others need; no library uses a GPU.
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    program = _ROOT / "tests" / "support" / _LIBRARIES[library]
    subprocess.run(
        [environment / "bin" / "python", program, folder], check=True, cwd=folder, env=settings
    )
    checkpoints = sorted(path.parents[1] for path in folder.glob("*/library/expected.safetensors"))
    assert checkpoints
    for checkpoint in checkpoints:
        write_expected(checkpoint)
    return checkpoints


def write_expected(checkpoint: Path) -> None:
    """Save a plain model with the weights that the library has computed."""
    weights = load_file(checkpoint / "library" / "expected.safetensors")
    del weights["logits"]
    layers = {name.removesuffix(".weight") for name in weights}
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        if name.rpartition(".")[0] not in layers or name.endswith(".bias"):
            weights[name] = tensor
    config = AutoConfig.from_pretrained(checkpoint)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config).half()
    model.load_state_dict(weights)
    model.save_pretrained(checkpoint / "expected")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_weights(written: list[Path]) -> None:
    for checkpoint in written:
        model = load_model(str(checkpoint), None, "float16", torch.device("cpu"), None)
        assert len(model.quantized) == 14
        pack_quantized(model.network, model.quantized, Implementation.TORCH)
        expected = load_file(checkpoint / "expected" / "model.safetensors")
        found = model.network.state_dict()
        assert found.keys() == expected.keys()
        different = [name for name, tensor in expected.items() if not found[name].equal(tensor)]
        assert different == [], checkpoint.name


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_logits_are_those_of_the_library(written: list[Path]) -> None:
    """It computes in float16."""
    for checkpoint in written:
        model = load_model(str(checkpoint), None, "float32", torch.device("cpu"), None)
        pack_quantized(model.network, model.quantized, Implementation.TORCH)
        model.network.set_attn_implementation("sdpa")
        with torch.inference_mode():
            found = model.network(torch.tensor([PROMPT])).logits[0]
        wanted = load_file(checkpoint / "library" / "expected.safetensors")["logits"].float()
        assert (found - wanted).abs().max() < 1e-2 * wanted.abs().max(), checkpoint.name


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_tokens_are_those_of_transformers(written: list[Path]) -> None:
    for checkpoint in written:
        async with served_model(checkpoint, dtype="float32") as worker:
            lane = LaneClient(worker.stub)
            await lane.open()
            sequence = Sequence(row=0, tokens=list(PROMPT), num_prompt_tokens=len(PROMPT))
            await Driver(lane).run([sequence], 16)
        expected = Reference(checkpoint / "expected").generate(PROMPT, 16)
        assert len(set(expected)) >= 6
        assert sequence.tokens[len(PROMPT) :] == expected, checkpoint.name
