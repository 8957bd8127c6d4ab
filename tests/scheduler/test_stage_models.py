"""A worker of several stages gives what one of a single rank gives: a real model, with chunks of
prompts, shared prefixes, choices, preemption of both kinds and swaps."""

from pathlib import Path

import pytest
from model_stack import outcome
from request_kinds import FEW_BLOCKS, MANY_BLOCKS, check_equal, load, requests
from tiny_models import FAMILIES, save_model


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
