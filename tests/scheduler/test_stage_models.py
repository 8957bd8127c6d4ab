"""A worker of several stages gives what one of a single rank gives: a real model, with chunks of
prompts, shared prefixes, choices, preemption of both kinds and swaps."""

from pathlib import Path

import pytest
from model_stack import outcome
from request_kinds import (
    FEW_BLOCKS,
    MANY_BLOCKS,
    MAX_NUM_BATCHED_TOKENS,
    check_equal,
    requests,
)
from tiny_models import FAMILIES, MAX_MODEL_LEN, save_model
from worker_driver import worker_settings

from worker_svc.runner.runner_loading import load_runner
from worker_svc.runner.step_runner import LoadedRunner


def load(model: Path, num_blocks: int, **changes: object) -> LoadedRunner:
    return load_runner(
        worker_settings(
            model,
            device="cpu",
            num_blocks=num_blocks,
            max_num_seqs=10,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            swap_space=2**20,
            weight_cache_size=0,
            **changes,
        )
    )


@pytest.mark.slow
async def test_stages_change_no_token(redis_url: str, sockets: Path, tmp_path: Path) -> None:
    model = save_model(FAMILIES["llama"](), tmp_path)
    expected = await outcome(redis_url, sockets, load(model, MANY_BLOCKS), requests())
    runner = load(model, FEW_BLOCKS, pipeline_parallel_size=2)
    found = await outcome(redis_url, sockets, runner, requests(), watermark=0)
    check_equal(found, expected)
    stats = found.stats
    assert stats.num_preempted_by_recompute > 0
    assert stats.num_preempted_by_swap > 0
    assert stats.num_hit_tokens > 0
