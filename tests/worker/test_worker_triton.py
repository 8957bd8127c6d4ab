"""Steps behind one another and padded graphs on the kernels of GPUs, interpreted."""

from pathlib import Path

import pytest
from host_device import HostCapturer, pipelined
from quantized_checkpoints import FORMATS, write_checkpoint
from tiny_models import Reference, llama, save_model
from worker_driver import worker_settings, written_by

from benchmarks.engines.workload import Work
from worker_svc.loading.runner_loading import load_runner

pytest.importorskip("kernels.gpu", reason="there are no Triton kernels")

_ROWS, _BUDGET, _BLOCK_SIZE, _NUM_BLOCKS = 3, 12, 8, 40


@pytest.mark.slow
def test_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    model = save_model(llama(), tmp_path)
    settings = worker_settings(
        model,
        device="cpu",
        kernels="triton",
        block_size=_BLOCK_SIZE,
        num_blocks=_NUM_BLOCKS,
        max_num_seqs=_ROWS,
        max_num_batched_tokens=_BUDGET,
        max_model_len=24,
    )
    capturer = HostCapturer()
    runner = pipelined(load_runner(settings), capturer)
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15, 16], [3], [4, 4]]
    work = Work(prompts, [4, 3, 4, 2])
    written = written_by(
        runner,
        work,
        max_num_seqs=_ROWS,
        max_num_batched_tokens=_BUDGET,
        block_size=_BLOCK_SIZE,
        num_blocks=_NUM_BLOCKS,
    )
    reference = Reference(model)
    assert written == [
        reference.generate(prompt, count)
        for prompt, count in zip(prompts, work.num_outputs, strict=True)
    ]
    # The graph of four rows, too, one of which is padding.
    assert capturer.num_replays[0]


@pytest.mark.slow
def test_tokens_are_those_of_the_weights_that_integers_stand_for(tmp_path: Path) -> None:
    model = write_checkpoint(FORMATS["gptq-4-act-order"], tmp_path, tied=True)
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 24, "num_blocks": _NUM_BLOCKS}
    settings = worker_settings(
        model, device="cpu", kernels="triton", block_size=_BLOCK_SIZE, **limits
    )
    work = Work([[5, 6, 7], [*range(8, 28)]], [3, 2])
    written = written_by(load_runner(settings).runner, work, block_size=_BLOCK_SIZE, **limits)
    reference = Reference(tmp_path / "expected")
    assert written == [
        reference.generate(prompt, count)
        for prompt, count in zip(work.prompts, work.num_outputs, strict=True)
    ]
