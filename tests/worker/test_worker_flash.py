"""How a worker comes to FlashAttention, and what its layers make of it."""

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from paged_cases import relative_rms
from structlog.testing import capture_logs
from tiny_models import VOCAB_SIZE, gemma2, gpt2, gpt_oss, llama, save_model
from torch import Tensor
from worker_driver import worker_settings

from kernels.attention import PagedBatch, paged_attention_reference
from kernels.dispatch import Implementation
from kernels.flash import FlashAttention, FlashBatch, PackageFlash, TorchFlash
from kernels.flash_dispatch import FLASH_SETTINGS, FlashKind
from worker_svc.cache.kv_pool import AttentionSpec, KvPool
from worker_svc.cache.pool_size import PoolSize
from worker_svc.errors import WrongSettingError
from worker_svc.loading.model_preparation import require_e4m3
from worker_svc.loading.runner_loading import load_runner
from worker_svc.model import paged_attention
from worker_svc.model.loading import load_model
from worker_svc.model.paged_attention import PagedAttention, choose_attention
from worker_svc.settings import WorkerSettings

_CPU, _GPU = torch.device("cpu"), torch.device("cuda")
_BLOCK_SIZE = 8
_LAYERS = (AttentionSpec(8, 128, 128, torch.bfloat16),) * 2


class MadeUpFlash:
    """Computes what FlashAttention is asked for, and notes what it was asked with."""

    def __init__(self) -> None:
        self.batches: list[FlashBatch] = []
        self.features: list[dict[str, Any]] = []

    def __call__(
        self,
        query: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: FlashBatch,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        self.batches.append(batch)
        features = {"sliding_window": sliding_window, "softcap": softcap}
        self.features.append(features)
        paged = PagedBatch(
            batch.block_table,
            batch.query_start_loc.long(),
            batch.seq_lens.long(),
            k_cache.shape[1],
        )
        return paged_attention_reference(query, k_cache, v_cache, paged, scale=scale, **features)


@pytest.mark.parametrize("config", [llama, gemma2, gpt2])
def test_all_layers_of_a_step_attend_through_it(config: Any, tmp_path: Path) -> None:
    folder = save_model(config(), tmp_path)
    model = load_model(str(folder), None, "auto", _CPU, None)
    flash = MadeUpFlash()
    logits = []
    for by in (flash, None):
        pool = KvPool(model.layers, PoolSize(6, 0), _BLOCK_SIZE, _CPU)
        paged = PagedAttention(pool.layers, Implementation.REFERENCE, None, by)
        model.set_attention(paged)
        draw = torch.Generator().manual_seed(1)
        # A prompt of two and a half blocks; then two tokens decoded.
        for positions in (torch.arange(20), torch.tensor([20]), torch.tensor([21])):
            table = torch.tensor([[3, 1, 5]], dtype=torch.int32)
            starts, lens = torch.tensor([0, len(positions)]), positions[-1:] + 1
            slots = table[0, positions // _BLOCK_SIZE] * _BLOCK_SIZE + positions % _BLOCK_SIZE
            paged.set_batch(PagedBatch(table, starts, lens, _BLOCK_SIZE), slots.long())
            tokens = torch.randint(VOCAB_SIZE, (len(positions),), generator=draw)
            with torch.inference_mode():
                logits.append(model.logits(tokens, positions, torch.tensor([len(positions) - 1])))
    for ours, expected in zip(logits[:3], logits[3:], strict=True):
        assert relative_rms(ours, expected) < 1e-5
    # Layers share a step's batch, and steps do not.
    assert [id(batch) for batch in flash.batches] == [
        id(flash.batches[3 * step]) for step in range(3) for _ in range(3)
    ]
    assert [batch.max_seq_len for batch in flash.batches[::3]] == [20, 21, 22]
    if config is gemma2:
        assert flash.features[:2] == [
            {"sliding_window": 6, "softcap": 2.0},
            {"sliding_window": None, "softcap": 2.0},
        ]


@pytest.mark.parametrize(
    ("config", "softcap", "has_sinks"),
    [(llama, None, False), (gemma2, 2.0, False), (gpt_oss, None, True)],
)
def test_the_probe_records_softcap_and_sinks(
    config: Any, softcap: float | None, has_sinks: bool, tmp_path: Path
) -> None:
    folder = save_model(config(), tmp_path)
    layers = load_model(str(folder), None, "auto", _CPU, None).layers
    assert [(layer.softcap, layer.has_sinks) for layer in layers] == [(softcap, has_sinks)] * 3


def test_every_kind_can_be_set() -> None:
    choices = get_args(WorkerSettings.model_fields["attention"].annotation)
    assert set(choices) == set(FLASH_SETTINGS)


def test_the_log_has_the_attention_and_the_reasons_against_each_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch_s, package_s = TorchFlash(lambda: None), PackageFlash(lambda: None, lambda: None)
    found: dict[FlashKind, FlashAttention] = {FlashKind.TORCH: torch_s}
    missing = {FlashKind.PACKAGE: "not installed"}
    monkeypatch.setattr(paged_attention, "find_flash", lambda: (found, missing))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    with capture_logs() as logs:
        assert choose_attention(_LAYERS, torch.bfloat16, 256, _GPU, "auto") is torch_s
        assert choose_attention(_LAYERS, torch.float8_e5m2, 256, _GPU, "auto") is None
        assert choose_attention(_LAYERS, torch.bfloat16, 256, _GPU, "paged") is None
        found[FlashKind.PACKAGE] = package_s
        del missing[FlashKind.PACKAGE]
        assert choose_attention(_LAYERS, torch.bfloat16, 256, _GPU, "auto") is package_s
        assert choose_attention(_LAYERS, torch.bfloat16, 256, _GPU, "torch-varlen") is torch_s
        assert choose_attention(_LAYERS, torch.bfloat16, 256, _GPU, "auto", "triton") is None
    missing[FlashKind.PACKAGE] = "not installed"
    reason = "reads no cache of float8_e5m2 with queries of bfloat16"
    assert {(log["event"], log["log_level"]) for log in logs} == {("attention", "info")}
    said = [{key: log[key] for key in log if key not in ("event", "log_level")} for log in logs]
    why, named = "the setting is paged", "the kernels are set: triton"
    assert said == [
        {"by": "torch-varlen", "not_flash_attn": "not installed"},
        {"by": "paged", "not_flash_attn": reason, "not_torch_varlen": reason},
        {"by": "paged", "not_flash_attn": why, "not_torch_varlen": why},
        {"by": "flash-attn", "not_torch_varlen": "flash-attn goes first"},
        {"by": "torch-varlen", "not_flash_attn": "the setting is torch-varlen"},
        {"by": "paged", "not_flash_attn": named, "not_torch_varlen": named},
    ]
    with pytest.raises(WrongSettingError, match="flash-attn: not installed"):
        choose_attention(_LAYERS, torch.bfloat16, 256, _GPU, "flash-attn")


def test_the_log_has_the_attention_of_a_loaded_model(tmp_path: Path) -> None:
    with capture_logs() as logs:
        load_runner(worker_settings(save_model(llama(), tmp_path), device="cpu"))
    [said] = [log for log in logs if log["event"] == "attention"]
    reason = "does not run on cpu"
    assert said["by"] == "paged"
    assert (said["not_flash_attn"], said["not_torch_varlen"]) == (reason, reason)


def test_a_setting_that_cannot_serve_is_refused(tmp_path: Path) -> None:
    folder = save_model(llama(), tmp_path)
    with pytest.raises(WrongSettingError, match="--attention: torch-varlen: does not run on cpu"):
        load_runner(worker_settings(folder, device="cpu", attention="torch-varlen"))


def test_types_without_gpu_instructions_are_refused() -> None:
    require_e4m3((8, 9))
    with pytest.raises(WrongSettingError, match=r"fp8_e4m3 needs .*8\.9, .* has 8\.6; fp8_e5"):
        require_e4m3((8, 6))
