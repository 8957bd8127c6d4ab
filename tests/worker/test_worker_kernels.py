"""The setting that says what computes."""

from pathlib import Path
from typing import get_args

import pytest
import torch
from structlog.testing import capture_logs
from tiny_models import Reference, llama, save_model
from worker_driver import worker_settings, written_by

from benchmarks.engines.workload import Work
from kernels.dispatch import SETTINGS, Implementation, cpp_implementations
from worker_svc.errors import WrongSettingError
from worker_svc.loading.runner_loading import load_runner
from worker_svc.settings import WorkerSettings

_ON_THIS_PROCESSOR = (Implementation.REFERENCE, Implementation.TORCH, *cpp_implementations())


def test_every_kernel_can_be_set() -> None:
    choices = get_args(WorkerSettings.model_fields["kernels"].annotation)
    assert set(choices) == set(SETTINGS)


def test_a_kernel_that_cannot_serve_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernels.dispatch.cpp_implementations", lambda: ())
    model = save_model(llama(), tmp_path / "model")
    with pytest.raises(WrongSettingError, match="--kernels: cpp: "):
        load_runner(worker_settings(model, kernels="cpp"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a processor computes with")
@pytest.mark.parametrize("kernels", _ON_THIS_PROCESSOR)
def test_the_selected_kernels_serve_and_the_log_names_them(
    tmp_path: Path, kernels: Implementation
) -> None:
    model = save_model(llama(), tmp_path / "model")
    with capture_logs() as logs:
        loaded = load_runner(worker_settings(model, kernels=kernels))
    assert [log["implementation"] for log in logs if log["event"] == "kernels"] == [kernels]
    identity = loaded.identity
    work = Work([[5, 6, 7], [8, 9, 10, 11, 12, 13]], [4, 3])
    written = written_by(
        loaded.runner,
        work,
        max_num_seqs=identity.max_num_seqs,
        max_num_batched_tokens=identity.max_num_batched_tokens,
        block_size=identity.block_size,
        num_blocks=identity.num_blocks,
    )
    reference = Reference(model)
    assert written == [
        reference.generate(prompt, count)
        for prompt, count in zip(work.prompts, work.num_outputs, strict=True)
    ]
