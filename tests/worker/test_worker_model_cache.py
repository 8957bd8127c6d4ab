"""Packed models on disk: the same outputs, from another start on, and never of other weights."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from tiny_models import gpt2, llama, mixtral, qwen3, save_model
from torch import Tensor
from worker_driver import worker_settings

from kernels.attention import PagedBatch
from kernels.dispatch import cpp_implementations
from worker_svc.cache.kv_pool import KvPool
from worker_svc.cache.pool_size import PoolSize
from worker_svc.loading.model_preparation import prepare_model
from worker_svc.loading.runner_loading import load_runner
from worker_svc.model.fused_forward import fuse_forward
from worker_svc.model.load_progress import LoadProgress
from worker_svc.model.paged_attention import PagedAttention
from worker_svc.model.served_model import ServedModel
from worker_svc.packed import model_cache
from worker_svc.packed.model_cache import ModelCache, default_folder
from worker_svc.packed.packed_model import PackedModel
from worker_svc.runner.multi_step import MultiStepRunner
from worker_svc.runner.runner import Runner
from worker_svc.settings import WorkerSettings

pytestmark = [
    pytest.mark.skipif(not cpp_implementations(), reason="there is no compiler"),
    pytest.mark.skipif(sys.platform != "linux", reason="maps files as on Linux"),
]

_CPU = torch.device("cpu")
_TOKENS = torch.tensor([3, 1, 4, 1, 5, 9])
_KEPT = torch.tensor([0, 5])
_TIMEOUT_S = 20.0


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model(qwen3(), tmp_path / "model")


def settings_of(model: Path, cache: Path, **changes: Any) -> WorkerSettings:
    values = {"device": "cpu", "weight_cache": cache, "weight_cache_size": 10**9, **changes}
    return worker_settings(model, **values)


def load(settings: WorkerSettings) -> ServedModel:
    loaded = load_runner(settings)
    assert isinstance(loaded.runner, MultiStepRunner)
    assert isinstance(loaded.runner.runner, Runner)
    return loaded.runner.runner._model


def wait_for(predicate: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while not predicate():
        assert time.monotonic() < deadline, f"timed out waiting for: {what}"
        time.sleep(0.005)


def load_and_store(settings: WorkerSettings) -> ServedModel:
    """From the checkpoint, until another file is in the cache."""
    assert settings.weight_cache is not None
    before = set(settings.weight_cache.glob("*.packed"))
    found = load(settings)
    folder = settings.weight_cache
    wait_for(lambda: set(folder.glob("*.packed")) - before, "the file")
    return found


def outputs(model: ServedModel) -> tuple[Tensor, Tensor]:
    """Logits and those of final states, on a pool of its own."""
    num_tokens = len(_TOKENS)
    pool = KvPool(model.layers, PoolSize(2, 0), num_tokens, _CPU)
    attention = PagedAttention(pool.layers, cpp_implementations()[-1])
    model.set_attention(attention)
    batch = PagedBatch(
        block_table=torch.ones(1, 1, dtype=torch.int32),
        query_start_loc=torch.tensor([0, num_tokens]),
        seq_lens=torch.tensor([num_tokens]),
        block_size=num_tokens,
    )
    positions = torch.arange(num_tokens)
    found = []
    with torch.inference_mode():
        for run in (
            lambda: model.logits(_TOKENS, positions, _KEPT),
            lambda: model.final_states(_TOKENS, positions).logits(_KEPT),
        ):
            attention.set_batch(batch, num_tokens + positions)
            found.append(run())
    return found[0], found[1]


_KINDS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4", "dtype": "bfloat16"},
}


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("tied", [False, True])
def test_the_second_start_gives_the_same(
    kind: str, tied: bool, tmp_path: Path, cache: Path
) -> None:
    config = qwen3()
    config.tie_word_embeddings = tied
    settings = settings_of(save_model(config, tmp_path / "model"), cache, **_KINDS[kind])
    first = load_and_store(settings)
    second = load(settings)
    assert not isinstance(first, PackedModel)
    assert isinstance(second, PackedModel)
    for name in ("layers", "dtype", "device", "max_model_len", "vocab_size", "fingerprint"):
        assert getattr(first, name) == getattr(second, name)
    assert sorted(first.weights) == sorted(second.weights)
    for one, other in zip(outputs(first), outputs(second), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5 if kind == "float32" else 0.02)
    assert outputs(first)[0].equal(outputs(second)[0])


def test_weights_that_are_tied_are_stored_once(tmp_path: Path, cache: Path) -> None:
    config = llama()
    config.vocab_size, config.tie_word_embeddings = 4096, True
    load_and_store(settings_of(save_model(config, tmp_path / "model"), cache, dtype="float32"))
    [file] = cache.iterdir()
    num_bytes = sum(f.stat().st_size for f in (tmp_path / "model").glob("*.safetensors"))
    # Tensors begin behind the index, at the next multiple of 2 MiB.
    assert file.stat().st_size < 2**21 + 1.2 * num_bytes


@pytest.mark.parametrize("config", [gpt2, mixtral])
def test_models_of_several_calls_are_not_cached(
    config: Callable[[], Any], tmp_path: Path, cache: Path
) -> None:
    settings = settings_of(save_model(config(), tmp_path / "model"), cache)
    for _ in range(2):
        assert not isinstance(load(settings), PackedModel)
    assert not list(cache.glob("*"))


@pytest.mark.slow
def test_transformers_is_not_imported(model: Path, cache: Path) -> None:
    load_and_store(settings_of(model, cache))
    script = f"""
import sys
from worker_driver import worker_settings
from worker_svc.loading.runner_loading import load_runner
from pathlib import Path
load_runner(worker_settings(
    Path({str(model)!r}), device="cpu", weight_cache={str(cache)!r}, weight_cache_size=10**9
))
print("transformers" in sys.modules)
"""
    run = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert run.stdout.splitlines()[-1] == "False"


def key_of(settings: WorkerSettings) -> str:
    found = ModelCache.of(settings, _CPU, LoadProgress())
    assert found is not None
    return found._key


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "bfloat16"},
        {"quantization": "int8"},
        {"max_model_len": 64},
        {"kernels": "cpp-portable"},
    ],
    ids=str,
)
def test_a_setting_that_changes_weights_has_its_own_file(
    change: dict[str, Any], model: Path, cache: Path
) -> None:
    before = key_of(settings_of(model, cache))
    assert key_of(settings_of(model, cache)) == before
    assert key_of(settings_of(model, cache, max_num_seqs=3)) == before
    assert key_of(settings_of(model, cache, **change)) != before


def test_the_code_that_prepares_models_is_a_part_of_the_key(
    model: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker_svc.packed.key._ROOT", tmp_path / "code")
    keys = {key_of(settings_of(model, cache))}
    for module in (fuse_forward.__module__, prepare_model.__module__, PackedModel.__module__):
        file = tmp_path / "code" / f"{module.replace('.', '/')}.py"
        file.parent.mkdir(parents=True)
        file.touch()
        keys.add(key_of(settings_of(model, cache)))
    assert len(keys) == 4


@pytest.mark.parametrize("name", ["quantize_config.json", "quant_config.json"])
def test_how_a_checkpoint_is_quantised_is_a_part_of_the_key(
    name: str, tmp_path: Path, cache: Path
) -> None:
    """Of older ones, config.json does not say it."""
    settings = settings_of(save_model(qwen3(), tmp_path), cache)
    keys = {key_of(settings)}
    for version in ("gptq", "gptq_v2"):
        (tmp_path / name).write_text(json.dumps({"checkpoint_format": version}))
        keys.add(key_of(settings))
    assert len(keys) == 3


def test_weights_that_are_replaced_are_loaded_anew(
    tmp_path: Path, model: Path, cache: Path
) -> None:
    """Also by a file of the same size and time."""
    settings = settings_of(model, cache)
    load_and_store(settings)
    other = save_model(qwen3(), tmp_path / "other", seed=1)
    [replaced], [by] = model.glob("*.safetensors"), other.glob("*.safetensors")
    found = replaced.stat()
    assert by.stat().st_size == found.st_size
    by.replace(replaced)
    os.utime(replaced, ns=(found.st_atime_ns, found.st_mtime_ns))
    after = load_and_store(settings)
    assert not isinstance(after, PackedModel)
    expected = load(settings_of(model, cache, weight_cache_size=0))
    assert outputs(after)[0].equal(outputs(expected)[0])
    assert outputs(load(settings))[0].equal(outputs(expected)[0])


def test_a_file_of_other_content_is_not_used(tmp_path: Path, model: Path, cache: Path) -> None:
    """Should a key not change, the fingerprint of the content does."""
    settings = settings_of(model, cache)
    load_and_store(settings)
    [file] = cache.iterdir()
    other = settings_of(save_model(qwen3(), tmp_path / "other", seed=1), cache)
    load_and_store(other)
    shutil.copyfile(cache / f"{key_of(other)}.packed", file)
    with capture_logs() as logs:
        assert not isinstance(load(settings), PackedModel)
    [line] = [line for line in logs if line["event"] == "packed weights are made again"]
    assert "another checkpoint" in line["reason"]


def _flip(file: Path, offset: int) -> None:
    content = bytearray(file.read_bytes())
    content[offset] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: os.truncate(file, file.stat().st_size - 1),
        lambda file: os.truncate(file, 10),
        lambda file: os.truncate(file, 0),
        lambda file: _flip(file, 0),
        lambda file: _flip(file, 9),
        lambda file: _flip(file, 19),
        lambda file: _flip(file, 100),
    ],
    ids=["end", "header", "empty", "magic", "sizes", "tensors", "index"],
)
def test_a_damaged_file_is_made_again(
    damage: Callable[[Path], object], model: Path, cache: Path
) -> None:
    settings = settings_of(model, cache)
    load_and_store(settings)
    [file] = cache.iterdir()
    content = file.read_bytes()
    damage(file)
    with capture_logs() as logs:
        assert not isinstance(load(settings), PackedModel)
        wait_for(lambda: file.exists() and file.read_bytes() == content, "the file")
    assert "packed weights are made again" in [line["event"] for line in logs]
    assert isinstance(load(settings), PackedModel)


def test_a_folder_that_cannot_be_written(tmp_path: Path, model: Path) -> None:
    (tmp_path / "file").touch()
    with capture_logs() as logs:
        assert not isinstance(load(settings_of(model, tmp_path / "file" / "cache")), PackedModel)
        wait_for(
            lambda: "packed weights are not cached" in [line["event"] for line in logs], "a line"
        )


@pytest.mark.parametrize(
    "changes",
    [
        {"weight_cache_size": 0},
        {"kernels": "torch"},
        {"kv_cache_dtype": "fp8_e5m2"},
        # Refused when the checkpoint is loaded.
        {"enable_torch_compile": True},
        {"attention": "torch-varlen"},
    ],
    ids=str,
)
def test_a_worker_without_a_cache(changes: dict[str, Any], model: Path, cache: Path) -> None:
    assert ModelCache.of(settings_of(model, cache, **changes), _CPU, LoadProgress()) is None


@pytest.fixture
def without_xdg(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    return None


@pytest.mark.usefixtures("without_xdg")
def test_the_folder_is_in_the_user_s_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert default_folder() == Path.home() / ".cache" / "quire" / "weights"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "quire" / "weights"


@pytest.mark.parametrize("shared", [False, True])
def test_mapped_weights_are_copied_unless_they_are_shared(
    shared: bool, model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(model, cache, weight_cache_shared=shared)
    load_and_store(settings)
    begun = []

    def in_this_thread(work: Callable[[], object], name: str) -> Any:
        begun.append(name)
        work()
        return model_cache.threading.current_thread()

    monkeypatch.setattr(model_cache, "_in_background", in_this_thread)
    monkeypatch.setattr(model_cache.threading.Thread, "join", lambda self: None)
    expected = load(settings_of(model, cache, weight_cache_size=0))
    found = load(settings)
    assert begun == (["read-ahead"] if shared else ["read-ahead", "huge-pages"])
    [file] = cache.iterdir()
    assert (str(file) in Path("/proc/self/maps").read_text()) == shared
    assert outputs(found)[0].equal(outputs(expected)[0])
