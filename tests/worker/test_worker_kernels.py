"""The setting that says what computes."""

from pathlib import Path
from typing import get_args

import pytest
from tiny_models import llama, save_model
from worker_driver import worker_settings

from kernels.choice import SETTINGS
from worker_svc.settings import WorkerSettings, WrongSettingError
from worker_svc.torch_engine import load_engine


def test_every_kernel_can_be_set() -> None:
    choices = get_args(WorkerSettings.model_fields["kernels"].annotation)
    assert set(choices) == set(SETTINGS)


def test_a_kernel_that_cannot_serve_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernels.choice.cpp_implementations", lambda: ())
    model = save_model(llama(), tmp_path / "model")
    with pytest.raises(WrongSettingError, match="--kernels: cpp: "):
        load_engine(worker_settings(model, kernels="cpp"))
