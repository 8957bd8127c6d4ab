"""Speculative decoding on the worker: drafts save steps and change no token."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from speculating_jobs import (
    NUM_OUTPUT,
    How,
    Job,
    KnownTokens,
    check_equal,
    mixed_jobs,
    run_jobs,
    with_drafter,
)
from tiny_models import FAMILIES, MAX_MODEL_LEN, save_model
from torch import Tensor
from worker_driver import Sampling, worker_settings

from kernels.dispatch import choose
from worker_svc.errors import WrongSettingError
from worker_svc.loading.drafter_loading import require_speculation
from worker_svc.loading.runner_loading import load_runner
from worker_svc.logits import built_in
from worker_svc.logits.processor import FailedRows, ProcessorContext
from worker_svc.plan.failures import NO_TOKEN
from worker_svc.plan.inputs import Ints
from worker_svc.plan.logits_params import LogitsParams
from worker_svc.plan.tables import RowTables
from worker_svc.runner.step_runner import LoadedRunner
from worker_svc.speculation.draft_lengths import DraftLengths
from worker_svc.speculation.draft_lines import DraftLines
from worker_svc.speculation.prompt_lookup import PromptLookup


@pytest.fixture(scope="module", params=FAMILIES)
def loaded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> LoadedRunner:
    folder: Path = save_model(FAMILIES[request.param](), tmp_path_factory.mktemp("model"))
    return load_runner(worker_settings(folder, device="cpu"))


def tables_of(loaded: LoadedRunner) -> RowTables:
    tables: RowTables = loaded.runner.runner._tables  # type: ignore[attr-defined]
    return tables


def test_drafts_change_no_token(loaded: LoadedRunner) -> None:
    jobs = mixed_jobs()
    expected = run_jobs(loaded.runner, jobs, How())
    assert expected.num_steps == NUM_OUTPUT
    for most, wrong_every, how in (
        (1, 0, How(lookahead=1)),
        (2, 3, How(lookahead=3, chunk=6)),
        (3, 2, How(lookahead=3)),
        (4, 5, How(lookahead=9, num_rounds=3)),
        (5, 0, How(lookahead=5, chunk=3)),
        (5, 1, How(lookahead=5)),
        (5, 4, How(lookahead=5, is_tight=True)),
    ):
        drafter = KnownTokens(expected.token_ids, most, wrong_every)
        found = run_jobs(with_drafter(loaded, drafter), jobs, how)
        check_equal(found, expected)
        assert 0 <= found.num_accepted <= found.num_drafts
        assert (found.num_accepted == 0) == (wrong_every == 1)
        if not wrong_every and how.chunk > 20:
            assert found.num_accepted == found.num_drafts
            assert found.num_steps == 1 + -(-(NUM_OUTPUT - 1) // (most + 1))


def test_what_followed_before_is_proposed(loaded: LoadedRunner) -> None:
    """By the drafter of prompt lookup: rows with two tokens to choose from repeat themselves."""
    two = LogitsParams(allowed_token_ids=np.array([3, 4]))
    jobs = [
        Job([3, 4, 3, 4, 3, 4], NUM_OUTPUT, params=two),
        Job([3, 3, 4, 3, 3, 4], NUM_OUTPUT, Sampling(0.8, seed=1, num_logprobs=2), two),
        *mixed_jobs()[:3],
    ]
    expected = run_jobs(loaded.runner, jobs, How())
    for most in range(1, 6):
        drafter = PromptLookup(most, tables_of(loaded), choose("cpu", ()))
        found = run_jobs(with_drafter(loaded, drafter), jobs, How(lookahead=2 * most))
        check_equal(found, expected)
        assert 0 < found.num_accepted <= found.num_drafts
    full = [*jobs, *mixed_jobs()[3:], *mixed_jobs()[3:]]
    drafter = PromptLookup(5, tables_of(loaded), choose("cpu", ()))
    found = run_jobs(with_drafter(loaded, drafter), full, How(lookahead=10))
    check_equal(found, run_jobs(loaded.runner, full, How()))
    # Where all rows run there is no room; later some have ended.
    assert found.num_drafts <= found.num_steps


def test_rows_without_drafts_get_none(loaded: LoadedRunner) -> None:
    jobs = [
        Job([3, 4, 3, 4, 3, 4], NUM_OUTPUT, without_drafts=True),
        Job([5, 6, 7] * 4, NUM_OUTPUT),
    ]
    expected = run_jobs(loaded.runner, jobs, How())
    drafter = KnownTokens(expected.token_ids, 5, 0)
    found = run_jobs(with_drafter(loaded, drafter), jobs, How(lookahead=5))
    check_equal(found, expected)
    assert found.num_drafts == found.num_accepted == (NUM_OUTPUT - 1) * 5 // 6 + 1
    found = run_jobs(with_drafter(loaded, drafter), jobs[:1], How(lookahead=5))
    assert found.num_drafts == 0


def test_a_row_ends_at_the_length_of_the_model(loaded: LoadedRunner) -> None:
    """No token is sampled behind the last place."""
    jobs = [Job([5, 6, 7] * 29, MAX_MODEL_LEN - 87)]
    expected = run_jobs(loaded.runner, jobs, How())
    drafter = KnownTokens(expected.token_ids, 5, 0)
    found = run_jobs(with_drafter(loaded, drafter), jobs, How(lookahead=5))
    check_equal(found, expected)
    assert found.num_accepted == found.num_drafts > 0


class FailsAtSixth:
    """No token of a row's output can follow the first five."""

    needs_token_ids = True

    def __init__(self, context: ProcessorContext) -> None:
        self._counts: dict[int, int] = {}

    def admit(
        self, row: int, params: LogitsParams, token_ids: Ints, num_prompt_tokens: int
    ) -> bool:
        self._counts[row] = len(token_ids) - num_prompt_tokens
        return True

    def release(self, row: int) -> None:
        del self._counts[row]

    def append(self, token_ids: Tensor, lines: Ints, rows: Ints) -> None:
        for row in rows.tolist():
            self._counts[row] += 1

    def apply(self, logits: Tensor, lines: Ints, rows: Ints) -> None:
        failing = [row for row in rows.tolist() if self._counts[row] == 5]
        if failing:
            raise FailedRows(dict.fromkeys(failing, NO_TOKEN))


@pytest.mark.parametrize("most", [0, 1, 3, 5])
def test_a_row_that_fails_behind_a_draft_keeps_its_tokens(
    loaded: LoadedRunner, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """The next step reports it, and the rows beside it go on."""
    jobs = [
        Job([5, 17, 99], NUM_OUTPUT, params=LogitsParams(min_tokens=1)),
        Job([3, 42], NUM_OUTPUT),
    ]
    expected = run_jobs(loaded.runner, [replace(job, params=None) for job in jobs], How())
    monkeypatch.setattr(built_in, "_BUILT_IN", (FailsAtSixth,))
    runner = with_drafter(loaded, KnownTokens(expected.token_ids, most, 0))
    found = run_jobs(runner, jobs, How(lookahead=5), failing={0})
    assert found.token_ids == [expected.token_ids[0][:5], expected.token_ids[1]]


def test_a_gpu_refuses_to_speculate(tmp_path: Path) -> None:
    settings = worker_settings(tmp_path, num_speculative_tokens=1)
    with pytest.raises(WrongSettingError, match=r"--num-speculative-tokens .* not on a GPU"):
        require_speculation(settings, torch.device("cuda"))


def test_lines_are_those_of_last_tokens_and_then_of_drafts() -> None:
    """Three rows of 3, 1 and 2 tokens, the last of which are 2, 0 and 1 drafts."""
    lines = DraftLines.of(np.array([2, 3, 5]), np.array([2, 0, 1]))
    assert lines.token_indices.tolist() == [0, 3, 4, 1, 5, 2]
    assert lines.longest == 2
    assert [lines.lines[:3, 0].tolist(), lines.lines[:1, 1].tolist()] == [[0, 3, 5], [1]]
    assert lines.lines[:2, 2].tolist() == [2, 4]
    some = lines.of_rows(np.array([0, 2]))
    assert some.num_drafts.tolist() == [2, 1]
    assert some.lines[:2].tolist() == [[0, 2], [3, 4]]


def test_a_row_without_success_pauses_and_one_with_success_has_all() -> None:
    lengths = DraftLengths(5, 4)
    both = np.array([1, 2])
    assert lengths.next(both).tolist() == [3, 3]
    for _ in range(12):
        counts = lengths.next(both)
        drafted = counts > 0
        lengths.observe(both[drafted], counts[drafted], np.array([counts[0], 0])[drafted])
    assert lengths.next(both).tolist() == [5, 0]
    later = [int(lengths.next(np.array([2]))[0]) for _ in range(100)]
    assert set(later) == {0, 1}
    lengths.admit(2)
    assert lengths.next(both).tolist() == [5, 3]
