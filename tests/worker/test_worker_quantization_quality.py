"""What the demo model's loss on held-out text loses by weights of 8 and 4 bits."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from demo.corpus import collect_documents
from demo.train import Recipe, encode, mean_loss, split
from kernels.dispatch import Implementation, cpp_implementations
from worker_svc.model.quantized.packing import pack_quantized
from worker_svc.model.quantized.sources import rounded_weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_MODEL = Path(__file__).parents[2] / "demo" / "model"


def load() -> Any:
    return AutoModelForCausalLM.from_pretrained(_MODEL)


@pytest.fixture(scope="module")
def held_out() -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(_MODEL / "tokenizer.json"))
    return encode(tokenizer, split(collect_documents(), Recipe())[1])


@pytest.fixture(scope="module")
def own_loss(held_out: list[list[int]]) -> float:
    with torch.inference_mode():
        return mean_loss(load(), held_out)


@pytest.mark.parametrize(("quantization", "bound"), [("int8", 0.005), ("int4", 0.03)])
@pytest.mark.parametrize(
    "implementation", [Implementation.TORCH, *cpp_implementations()[-1:]], ids=str
)
def test_held_out_loss(
    implementation: Implementation,
    quantization: str,
    bound: float,
    held_out: list[list[int]],
    own_loss: float,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = load()
    pack_quantized(model, rounded_weights(model, quantization), implementation)
    with torch.inference_mode():
        loss = mean_loss(model, held_out)
    change = loss / own_loss - 1
    with capsys.disabled():
        # Test processes have no other way to the terminal.
        print(
            f"\n{quantization} by {implementation}: {loss:.4f}, {change:+.2%} of {own_loss:.4f}",
            file=sys.__stderr__,
        )
    assert change <= bound
