"""GGUF files as models of a local stack."""

from pathlib import Path

import pytest

from quire import Client, SamplingParams
from quire.launcher.errors import LaunchError
from quire.launcher.gguf_model import model_folder
from quire.launcher.stack import LocalStack


def test_other_models_are_served_as_they_are(tmp_path: Path) -> None:
    assert model_folder("Qwen/Qwen3-0.6B", tmp_path) == "Qwen/Qwen3-0.6B"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    with pytest.raises(LaunchError, match=r"nothing\.gguf: not a complete GGUF file"):
        model_folder(str(tmp_path / "nothing.gguf"), tmp_path)


@pytest.mark.slow
def test_a_file_is_served(tmp_path: Path) -> None:
    models = pytest.importorskip("gguf_models")
    file = models.write_gguf(models.qwen3(), tmp_path, lambda name: "Q4_K")
    with LocalStack(str(file)) as stack, Client(stack.address) as client:
        assert [model.name for model in client.list_models()] == ["model.gguf"]
        output = client.generate("ab", SamplingParams(max_tokens=5, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 5
