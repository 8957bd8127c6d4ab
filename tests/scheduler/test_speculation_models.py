"""Speculation changes no token of real models, whatever happens to their requests."""

from dataclasses import replace
from pathlib import Path

import pytest
from draft_models import FREE, save_disturbed
from model_stack import Outcome, Request, outcome
from request_kinds import (
    FEW_BLOCKS,
    MANY_BLOCKS,
    MAX_NUM_BATCHED_TOKENS,
    check_equal,
    load,
    requests,
)
from tiny_models import FAMILIES, save_model

from worker_svc.runner.step_runner import LoadedRunner
from worker_svc.speculation import draft_budget
from worker_svc.speculation.priced_lengths import DraftPrice

DEMO = "demo/model"


def without_changes(some: list[Request]) -> list[Request]:
    """The same requests, greedy and sampled, with logits that nothing changes."""
    return [
        replace(request, logits=None, params={"temperature": 0.9, "top_k": 20} if at % 2 else {})
        for at, request in enumerate(some)
    ]


def load_speculating(
    model: Path, num_blocks: int, num_drafts: int, draft: Path | None = None
) -> LoadedRunner:
    return load(
        model,
        num_blocks,
        num_speculative_tokens=num_drafts,
        speculative_model=None if draft is None else str(draft),
    )


def check_that_all_happened(found: Outcome, num_drafts: int) -> None:
    stats = found.stats
    assert stats.num_preempted_by_recompute > 0
    assert stats.num_preempted_by_swap > 0
    assert stats.num_hit_tokens > 0
    assert 0 < stats.accepted_tokens.total() < stats.draft_tokens.total()
    assert stats.accepted_tokens[min(num_drafts, 3) - 1] > 0
    # Some prompts have more tokens than a step may have.
    assert max(len(one.prompt) for one in requests()) > MAX_NUM_BATCHED_TOKENS


async def check_model(
    redis_url: str,
    sockets: Path,
    model: Path,
    numbers_of_drafts: list[int],
    draft: Path | None = None,
) -> None:
    expected = await outcome(
        redis_url, sockets, load_speculating(model, MANY_BLOCKS, 0), requests()
    )
    assert not expected.stats.draft_tokens
    assert expected.stats.num_preempted_by_recompute + expected.stats.num_preempted_by_swap == 0
    for count in numbers_of_drafts:
        found = await outcome(
            redis_url,
            sockets,
            load_speculating(model, FEW_BLOCKS, count, draft),
            requests(),
            watermark=0,
        )
        check_equal(found, expected)
        check_that_all_happened(found, count)


@pytest.fixture(autouse=True)
def room_for_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full steps have drafts, too, also of models whose passes take longer than they save."""
    monkeypatch.setattr(draft_budget, "MAX_STEP_TOKENS", 64)
    monkeypatch.setattr(DraftPrice, "of", lambda *_: FREE)


@pytest.mark.slow
async def test_prompt_lookup_changes_no_token(
    redis_url: str, sockets: Path, tmp_path: Path
) -> None:
    await check_model(redis_url, sockets, save_model(FAMILIES["llama"](), tmp_path), [3])


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, DEMO])
async def test_prompt_lookup_changes_no_token_of_any_family(
    redis_url: str, sockets: Path, tmp_path: Path, family: str
) -> None:
    model = Path(DEMO) if family == DEMO else save_model(FAMILIES[family](), tmp_path)
    await check_model(redis_url, sockets, model, [1, 2, 3, 4, 5])


@pytest.mark.slow
async def test_the_target_as_its_draft_model_is_always_right(
    redis_url: str, sockets: Path, tmp_path: Path
) -> None:
    """So its cache has what the target's has: through shared prefixes, forks, preemption of both
    kinds and swaps."""
    model, some = save_model(FAMILIES["llama"](), tmp_path), without_changes(requests())
    expected = await outcome(redis_url, sockets, load_speculating(model, MANY_BLOCKS, 0), some)
    runner = load_speculating(model, FEW_BLOCKS, 4, draft=model)
    found = await outcome(redis_url, sockets, runner, some, watermark=0)
    check_equal(found, expected)
    stats = found.stats
    assert stats.num_preempted_by_recompute > 0
    assert stats.num_preempted_by_swap > 0
    assert stats.num_hit_tokens > 0
    assert stats.accepted_tokens == stats.draft_tokens
    assert stats.draft_tokens[3] > 0


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
async def test_a_draft_model_changes_no_token_of_any_family(
    redis_url: str, sockets: Path, tmp_path: Path, family: str
) -> None:
    model = save_model(FAMILIES[family](), tmp_path / "model")
    draft = save_disturbed(model, tmp_path / "draft", scale=0.03)
    await check_model(redis_url, sockets, model, [1, 3, 5], draft)
