"""GGUF files as models of a local stack."""

import os
import shutil
from pathlib import Path

import pytest

from quire import Client, SamplingParams
from quire.launcher import gguf_model
from quire.launcher.errors import LaunchError
from quire.launcher.gguf_model import model_folder
from quire.launcher.stack import LocalStack


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "quire" / "gguf"


def test_other_models_are_served_as_they_are(cache: Path) -> None:
    assert model_folder("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    assert not cache.exists()


def test_a_file_that_is_not_there(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(LaunchError, match=r"nothing\.gguf: No such file"):
        model_folder(str(tmp_path / "nothing.gguf"))
    assert not cache.exists()


def test_another_converter_makes_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converter = tmp_path / "worker_svc" / "model" / "quantized"
    shutil.copytree(gguf_model._modules(), converter)
    assert (converter / "gguf_folder.py").is_file()
    monkeypatch.setattr(gguf_model, "_modules", lambda: converter)
    monkeypatch.setattr(gguf_model, "_make", lambda file, folder: folder.mkdir(parents=True))
    file = tmp_path / "model.gguf"
    file.touch()
    folders = [model_folder(str(file))]
    assert model_folder(str(file)) == folders[0]
    with (converter / "gguf_config.py").open("a") as module:
        module.write("# Changed.")
    folders.append(model_folder(str(file)))
    for package in ("quire", "transformers", "gguf"):
        versions = {package: "99"}
        monkeypatch.setattr(gguf_model, "version", lambda name, of=versions: of.get(name, "1"))
        folders.append(model_folder(str(file)))
    assert len(set(folders)) == 5


@pytest.mark.slow
def test_a_file_that_cannot_be_served(tmp_path: Path, cache: Path) -> None:
    pytest.importorskip("gguf")
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(LaunchError, match=r"model\.gguf: not a complete GGUF file"):
        model_folder(str(file))
    assert not list(cache.iterdir())


@pytest.mark.slow
def test_a_file_is_served(tmp_path: Path, cache: Path) -> None:
    models = pytest.importorskip("gguf_models")
    file = models.write_gguf(models.qwen3(), tmp_path, lambda name: "Q4_K")
    with LocalStack(str(file)) as stack, Client(stack.address) as client:
        assert [model.name for model in client.list_models()] == ["model.gguf"]
        output = client.generate("ab", SamplingParams(max_tokens=5, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 5
    [folder] = cache.iterdir()
    assert model_folder(str(file)) == str(folder)
    os.utime(file, ns=(0, 0))
    assert model_folder(str(file)) != str(folder)
