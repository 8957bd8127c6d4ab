"""Draft models on the worker: they save steps, change no token, and their cache follows the
target's."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from draft_models import FREE, free_drafts, passes_of, runner_of, save_disturbed, save_truncated
from sequence_script import Script
from speculating_jobs import (
    NUM_OUTPUT,
    How,
    Job,
    check_equal,
    mixed_jobs,
    run_jobs,
    with_drafter,
)
from tiny_models import FAMILIES, llama, save_model
from torch import Tensor
from transformers import BloomConfig
from worker_driver import BLOCK_SIZE, Sampling, worker_settings

from worker_svc.errors import WrongSettingError
from worker_svc.loading.drafter_loading import require_speculation
from worker_svc.loading.runner_loading import load_runner
from worker_svc.plan.inputs import Ints
from worker_svc.runner.step_runner import LoadedRunner
from worker_svc.speculation import draft_budget
from worker_svc.speculation.draft_passes import DraftPasses
from worker_svc.speculation.priced_lengths import DraftPrice, PricedLengths
from worker_svc.speculation.vocabularies import vocabulary_difference

MOST = 5
PROMPT = [5, 17, 99, 3, 42, 8, 61, 7, 30, 11]
GREEDY = [
    Job([5, 17, 99, 3, 42] * 4, NUM_OUTPUT),
    Job([61, 7], NUM_OUTPUT),
    Job([150, 8, 3], 9),
]
SAMPLED = [
    Job([61, 7], NUM_OUTPUT, Sampling(temperature=1, seed=3)),
    Job([150], NUM_OUTPUT, Sampling(0.6, top_k=9, top_p=0.8, min_p=0.01, seed=4)),
]


def load(target: Path, draft: Path, **changes: object) -> LoadedRunner:
    settings = worker_settings(
        target,
        device="cpu",
        speculative_model=str(draft),
        num_speculative_tokens=MOST,
        swap_space="1MiB",
        weight_cache_size=0,
        **changes,
    )
    return load_runner(settings)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(FAMILIES[request.param](), tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(llama(), tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def same(folder: Path) -> LoadedRunner:
    """A worker whose draft model is the target."""
    return load(folder, folder)


@pytest.fixture(
    scope="module", params=["truncated", pytest.param("disturbed", marks=pytest.mark.slow)]
)
def other(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> LoadedRunner:
    """A worker whose draft model is sometimes right."""
    saved = tmp_path_factory.mktemp("draft")
    if request.param == "truncated":
        return load(folder, save_truncated(folder, saved, 1))
    return load(folder, save_disturbed(folder, saved))


@pytest.fixture(autouse=True)
def roomy_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows of these tests have drafts at once."""
    monkeypatch.setattr(draft_budget, "MAX_STEP_TOKENS", 64)


def test_drafts_of_a_model_change_no_token(other: LoadedRunner) -> None:
    jobs = mixed_jobs()
    expected = run_jobs(other.runner, jobs, How())
    num_accepted = 0
    for most, how in (
        (1, How(lookahead=2)),
        (2, How(lookahead=3, chunk=6)),
        (3, How(lookahead=9, num_rounds=3)),
        (4, How(lookahead=4, is_tight=True)),
        (5, How(lookahead=10)),
    ):
        found = run_jobs(with_drafter(other, free_drafts(other, most)), jobs, how)
        check_equal(found, expected)
        assert found.num_accepted < found.num_drafts
        num_accepted += found.num_accepted
    assert num_accepted > 0


@pytest.mark.parametrize("jobs", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_target_itself_is_always_right(same: LoadedRunner, jobs: list[Job]) -> None:
    """At any temperature: its drafts are sampled with the rows' own seeds and positions."""
    expected = run_jobs(same.runner, jobs, How())
    for most, how in (
        (1, How(lookahead=1)),
        (3, How(lookahead=3, chunk=2)),
        (4, How(lookahead=12, num_rounds=2)),
        (5, How(lookahead=5)),
        (5, How(lookahead=5, is_tight=True)),
    ):
        found = run_jobs(with_drafter(same, free_drafts(same, most)), jobs, how)
        check_equal(found, expected)
        assert found.num_accepted == found.num_drafts > 0
    assert found.num_steps < expected.num_steps


def test_blocks_have_what_both_models_cache(same: LoadedRunner) -> None:
    """A prefix is shared, a block is copied for a fork, a row leaves to the host and comes back
    into other blocks, all rows are released: the draft model knows all of these tokens."""
    runner = with_drafter(same, free_drafts(same, MOST))
    script = Script(runner, MOST)
    script.admit("first", PROMPT, 64, [])
    for _ in range(3):
        script.step()
    # What the last step has accepted is not in the draft model's cache yet.
    assert passes_of(same).num_pending() > 0
    prefix = [*script.tokens("first")[: 3 * BLOCK_SIZE], 1, 2]
    script.admit("prefix", prefix, 64, script.block_ids("first")[:3])
    script.fork("first", "fork")
    script.step()
    script.step()
    script.swap_out("first")
    script.step()
    script.swap_in("first")
    script.step()
    script.step()
    shared, known = script.block_ids("fork")[:4], script.tokens("fork")
    runner.clear()
    after = Script(runner, MOST, first_block=100)
    after.admit("again", known[: 4 * BLOCK_SIZE + 1], 64, shared)
    after.step()
    after.step()
    runner.clear()
    assert script.num_accepted == script.num_drafts > 40
    assert after.num_accepted == after.num_drafts > 0
    written = {name: (PROMPT, script.tokens(name)) for name in ("first", "fork")}
    written["prefix"] = (prefix, script.tokens("prefix"))
    written["again"] = (PROMPT, after.tokens("again"))
    for prompt, tokens in written.values():
        job = Job(prompt, len(tokens) - len(prompt))
        assert run_jobs(same.runner, [job], How()).token_ids == [tokens[len(prompt) :]]


def test_a_pass_computes_the_tokens_of_many_steps(
    same: LoadedRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows without drafts cost a pass when they are released, not one in each step."""
    passes: list[int] = []
    compute = DraftPasses._compute

    def counted(self: DraftPasses, rows: Ints, ends: Ints, num_read: int) -> Tensor | None:
        passes.append(num_read)
        return compute(self, rows, ends, num_read)

    monkeypatch.setattr(DraftPasses, "_compute", counted)
    run_jobs(same.runner, GREEDY, How())
    assert passes == [0]


def test_pending_tokens_are_computed_before_they_are_more_than_a_step_s(tiny_llama: Path) -> None:
    loaded = load(tiny_llama, tiny_llama, max_num_batched_tokens=40)
    script = Script(loaded.runner, 0)
    counts = []
    for name in ("one", "two", "three"):
        script.admit(name, [7] * 30, 64, [])
        for _ in range(8):
            script.step()
            counts.append(passes_of(loaded).num_pending())
    assert max(counts) < 2 * 40
    assert counts[:8] == [30 + more for more in range(8)]
    loaded.runner.clear()
    assert passes_of(loaded).num_pending() == 0


def test_a_block_counts_what_both_models_cache(tiny_llama: Path, tmp_path: Path) -> None:
    alone = load_runner(worker_settings(tiny_llama, device="cpu"))
    both = load(tiny_llama, save_truncated(tiny_llama, tmp_path, 1))
    layers = runner_of(both)._pool.layers
    assert len(layers) == len(runner_of(alone)._pool.layers) + 1
    assert {cache.shape[0] for pair in layers for cache in pair} == {200}
    memory = {"num_blocks": None, "kv_cache_memory": 2**20}
    drafts = {"speculative_model": str(tiny_llama), "num_speculative_tokens": 1}
    sizes = [
        load_runner(worker_settings(tiny_llama, device="cpu", **memory, **more)).identity.num_blocks
        for more in ({}, drafts)
    ]
    assert sizes[0] // 2 == sizes[1]


def test_the_draft_model_caches_in_8_bits_as_well(tiny_llama: Path) -> None:
    loaded = load(tiny_llama, tiny_llama, kv_cache_dtype="fp8_e4m3")
    expected = run_jobs(loaded.runner, GREEDY, How())
    found = run_jobs(with_drafter(loaded, free_drafts(loaded, MOST)), GREEDY, How(lookahead=5))
    check_equal(found, expected)
    assert found.num_accepted == found.num_drafts > 0


@pytest.mark.slow
def test_a_worker_of_two_ranks_has_a_draft_model(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`test_worker_staged_runner.py` tests stages, without processes."""
    expected = run_jobs(
        load_runner(worker_settings(tiny_llama, device="cpu")).runner, GREEDY, How()
    )
    monkeypatch.setattr(DraftPrice, "of", lambda *bytes_of_weights: FREE)
    loaded = load(tiny_llama, save_disturbed(tiny_llama, tmp_path), tensor_parallel_size=2)
    try:
        found = run_jobs(loaded.runner, GREEDY, How(lookahead=5))
    finally:
        loaded.close()
    check_equal(found, expected)
    assert found.num_accepted > 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"vocab_size": 212}, "vocabulary of 212 tokens, and the model one of 211"),
        ({"max_position_embeddings": 64}, "96 positions.*--max-model-len: 96 .* 64"),
    ],
)
def test_a_draft_model_that_does_not_fit_is_refused(
    changes: dict[str, int], reason: str, tmp_path: Path, tiny_llama: Path
) -> None:
    config = llama()
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(WrongSettingError, match=f"--speculative-model .*{reason}"):
        load(tiny_llama, save_model(config, tmp_path / "draft"))


def test_a_draft_model_that_cannot_be_served_is_refused(tmp_path: Path, tiny_llama: Path) -> None:
    BloomConfig().save_pretrained(tmp_path / "bloom")
    (tmp_path / "bloom/model.safetensors").touch()
    # Weights of another shape than the configuration says.
    config = json.loads((save_model(llama(), tmp_path / "other") / "config.json").read_text())
    config["intermediate_size"] *= 2
    (tmp_path / "other/config.json").write_text(json.dumps(config))
    other = r"down_proj.weight: \[32, 48\] in the checkpoint, not \[32, 96\]"
    reasons = {"bloom": "BloomForCausalLM", "absent": "no such folder", "other": other}
    for draft, reason in reasons.items():
        with pytest.raises(WrongSettingError, match=f"--speculative-model .*{reason}"):
            load(tiny_llama, tmp_path / draft)


def test_a_draft_model_needs_drafts(tmp_path: Path) -> None:
    settings = worker_settings(tmp_path, speculative_model="draft")
    with pytest.raises(WrongSettingError, match=r"--speculative-model .* set it to 1 or more"):
        require_speculation(settings, torch.device("cpu"))


def test_a_draft_model_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    folders = [save_model(llama(), tmp_path / name) for name in ("target", "draft")]
    tokenizers = [
        {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "<s>"}]},
        {"model": {"vocab": {"b": 0, "a": 1}}},
    ]
    for folder, tokenizer in zip(folders, tokenizers, strict=True):
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(WrongSettingError, match=r"3 tokens differ, the first is 0: 'b', .* 'a'"):
        load(*folders)


def test_vocabularies_are_compared_by_what_an_id_stands_for(tmp_path: Path) -> None:
    target, draft = tmp_path / "target.json", tmp_path / "draft.json"
    target.write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": None}))
    assert vocabulary_difference(target, draft) is None
    draft.write_text(json.dumps({"model": {"vocab": [["a", -1.5], ["b", -2.0]]}}))
    assert vocabulary_difference(target, draft) is None
    draft.write_text(json.dumps({"model": {"vocab": [["a", -1.5]]}}))
    assert vocabulary_difference(target, draft) == (
        "1 tokens differ, the first is 1: None, which the model has as 'b'"
    )


PRICE = DraftPrice(plan=20, target_pass=10, token=1, draft_pass=4, verifying=1)


@pytest.mark.parametrize(
    ("num_rows", "drafting", "is_one_of_rounds", "expected"),
    [
        # Of one row: 1 token in 30, 1.5 in 36, 1.75 in 41, 1.875 in 46.
        (1, 1, False, [2]),
        # 1 token in 10, 1.5 in 16.
        (1, 1, True, [0]),
        # 2 tokens in 31; with drafts of both 3 in 38, 3.5 in 44, 3.75 in 50.
        (2, 2, False, [2, 2]),
        # 2 tokens in 31; with drafts of one 2.5 in 37, 2.75 in 42.
        (2, 1, False, [1]),
        # 4 tokens in 13, 6 in 22, 7 in 30.
        (4, 4, True, [0, 0, 0, 0]),
        # 8 tokens in 37, 8.5 in 43: a pass for one row delays all.
        (8, 1, False, [0]),
    ],
)
def test_drafts_pay_for_all_rows_of_their_step(
    num_rows: int, drafting: int, is_one_of_rounds: bool, expected: list[int]
) -> None:
    """Of new rows, half of whose drafts count as right."""
    lengths = PricedLengths(5, PRICE, 8)
    lengths.begin_step(num_rows, is_one_of_rounds=is_one_of_rounds)
    assert lengths.next(np.arange(drafting)).tolist() == expected


def test_rows_whose_drafts_are_wrong_have_few_all_in_the_same_steps() -> None:
    lengths, rows = PricedLengths(5, PRICE, 4), np.array([1, 2, 3])
    lengths.begin_step(3, is_one_of_rounds=False)
    for _ in range(20):
        counts = lengths.next(rows)
        drafted = counts > 0
        right = np.array([counts[0], 0, 0])
        lengths.observe(rows[drafted], counts[drafted], right[drafted])
    assert lengths.next(rows).tolist() == [5, 0, 0]
    later = [lengths.next(rows).tolist() for _ in range(64)]
    assert [counts for counts in later if counts[1:] != [0, 0]] == 2 * [[5, 1, 1]]
    lengths.admit(2)
    # About 9 tokens in 63: the third draft of a row whose drafts are right in half of the cases
    # gives 0.125 tokens in the time of one, 1.
    assert lengths.next(rows).tolist() == [5, 2, 0]


def test_a_draft_of_a_large_model_costs_its_weights() -> None:
    """Of a small one, constants of about 20 GB/s: a pass, a token, a plan in all services."""
    large, small = DraftPrice.of(1e9, 7e9), DraftPrice.of(1e6, 7e6)
    assert large.draft_pass / large.target_pass == pytest.approx(1 / 7, rel=0.01)
    assert large.token / large.target_pass == pytest.approx(0.05, rel=0.01)
    assert large.plan / large.target_pass < 0.01
    assert small.plan == small.target_pass == 2.5 * small.draft_pass == 2.5 * small.verifying
