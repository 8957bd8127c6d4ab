"""Logits processors of other packages: found by name, given their arguments, called last."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from logits_cases import INF
from logits_jobs import Job, Schedule, run_jobs
from logits_pipeline import admission, append, changes, pipeline
from structlog.testing import capture_logs
from tiny_models import VOCAB_SIZE, llama, save_model
from worker_driver import Sampling, worker_settings

from worker_svc.errors import WrongSettingError
from worker_svc.loading.runner_loading import load_runner
from worker_svc.logits.entry_points import load_processors
from worker_svc.logits.pipeline import LogitsPipeline
from worker_svc.plan.failures import InvalidField, RowFailure
from worker_svc.plan.inputs import Ints
from worker_svc.plan.logits_params import LogitsParams

_ROOT = Path(__file__).resolve().parents[2]
_ENTRY_POINTS = """\
[quire.logits_processors]
no_tokens = quire_test_package:NoTokens
broken = quire_test_package_that_is_not_there:Broken
[other]
foreign = quire_test_package:NoTokens
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with the example of the documentation."""
    page = (_ROOT / "docs" / "logits.md").read_text()
    (tmp_path / "quire_test_package.py").write_text(
        re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)[0]
    )
    metadata = tmp_path / "quire_test_package-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: quire-test-package\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(_ENTRY_POINTS)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "quire_test_package", raising=False)


def applied(processors: LogitsPipeline, *rows: int) -> list[list[int]]:
    """The tokens of each row that are possible."""
    logits = torch.zeros(len(rows), 5)
    assert not processors.apply(logits, np.array(rows))
    return [(line > -INF).nonzero().flatten().tolist() for line in logits]


def test_the_example_of_the_documentation(package: None) -> None:
    processors = pipeline(5, own=load_processors(" no_tokens "))
    listed = LogitsParams(processor_args={"no_tokens": {"token_ids": [1.0, 4.0]}})
    rows = [admission(0, listed, [0]), admission(1, LogitsParams(min_tokens=1), [0])]
    assert not processors.change_rows(changes([*rows, admission(2, listed, [0], [3])]))
    every = [0, 1, 2, 3, 4]
    assert applied(processors, 0, 1, 2) == [every, every, [0, 2, 3]]
    append(processors, [0, 1, 2], [1, 1, 1])
    assert applied(processors, 0, 1, 2) == [[0, 2, 3], every, every]


def test_it_comes_after_the_built_in_ones(package: None) -> None:
    seen: list[torch.Tensor] = []

    class Seeing:
        needs_token_ids = False

        def __init__(self, context: object) -> None:
            pass

        def admit(self, *arguments: object) -> bool:
            return True

        def release(self, row: int) -> None:
            pass

        def append(self, *arguments: object) -> None:
            pass

        def apply(self, logits: torch.Tensor, lines: object, rows: object) -> None:
            seen.append(logits.clone())

    processors = pipeline(5, own={"seeing": Seeing})
    params = LogitsParams(
        allowed_token_ids=np.array([1, 2]),
        bias_token_ids=np.array([2]),
        biases=np.array([3], np.float32),
        presence_penalty=1.5,
    )
    processors.change_rows(changes([admission(0, params, [0], [2, 2])]))
    applied(processors, 0)
    assert seen[0].tolist() == [[-INF, 0, 1.5, -INF, -INF]]


def test_arguments_of_a_processor_that_is_not_loaded_fail_their_row(package: None) -> None:
    processors = pipeline(5, own=load_processors("no_tokens"))
    params = LogitsParams(processor_args={"others": 3, "no_tokens": {"token_ids": []}})
    plan = changes([admission(3, params, [0]), admission(4, None, [0])])
    failure = RowFailure(
        "names a logits processor that the worker does not have; it has: no_tokens",
        InvalidField("sampling_params.processor_args.others", "UNKNOWN_PROCESSOR"),
    )
    assert processors.change_rows(plan) == {3: failure}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, "KeyError: 'token_ids'"),
        ({"token_ids": "x"}, "ValueError: .*'x'"),
        ({"token_ids": [1, 5]}, "token_ids has an id that the model does not have"),
    ],
)
def test_arguments_that_a_processor_refuses_fail_their_row(
    package: None, arguments: dict[str, object], reason: str
) -> None:
    processors = pipeline(5, own=load_processors("no_tokens"))
    wrong = LogitsParams(processor_args={"no_tokens": arguments})
    rows = [admission(0, wrong, [0]), admission(1, None, [0])]
    [(row, failure)] = processors.change_rows(changes(rows)).items()
    assert row == 0
    assert re.fullmatch(f"is refused by the logits processor: {reason}", failure.message)
    assert failure.invalid_field == InvalidField(
        "sampling_params.processor_args.no_tokens", "INVALID_PROCESSOR_ARGS"
    )


class Failing:
    """Fails in `admit` for prompts of one token, else in `apply`."""

    needs_token_ids = False

    def __init__(self, context: object) -> None:
        pass

    def admit(self, row: int, params: LogitsParams, token_ids: Ints, num_prompt: int) -> bool:
        if num_prompt == 1:
            raise KeyError("admit")
        return num_prompt == 2

    def release(self, row: int) -> None:
        pass

    def append(self, *arguments: object) -> None:
        pass

    def apply(self, *arguments: object) -> None:
        raise KeyError("apply")


def test_an_error_of_a_processor_fails_its_rows_and_no_others() -> None:
    """Without arguments the request is not at fault."""
    processors = pipeline(5, own={"failing": Failing})
    params = LogitsParams(min_tokens=1)
    rows = [admission(row, params, range(row + 1)) for row in range(3)]
    failures = processors.change_rows(changes(rows))
    assert failures == {0: RowFailure("the logits processor Failing failed: 'admit'")}
    failures = processors.apply(torch.zeros(2, 5), np.array([1, 2]))
    assert failures == {1: RowFailure("the logits processor Failing failed: 'apply'")}
    processors.change_rows(changes(released=[0, 1, 2]))
    assert not processors.changed(np.array([0, 1, 2])).any()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("missing", r"no logits processor missing; installed .*: broken, no_tokens$"),
        ("no_tokens,foreign", "no logits processor foreign"),
        ("broken", "broken .* cannot be imported"),
        ("no_tokens, no_tokens", "no_tokens is named twice"),
    ],
)
def test_a_name_that_cannot_be_loaded_is_refused(setting: str, message: str, package: None) -> None:
    with pytest.raises(WrongSettingError, match=f"^--logits-processors: .*{message}"):
        load_processors(setting)


def test_a_worker_loads_them_by_its_setting(package: None, tmp_path: Path) -> None:
    with pytest.raises(WrongSettingError, match="no logits processor missing"):
        # Before anything of the model is read.
        load_runner(worker_settings(tmp_path / "nothing", logits_processors="missing"))
    folder = save_model(llama(), tmp_path / "model")
    settings = worker_settings(folder, device="cpu", logits_processors="no_tokens")
    runner = load_runner(settings).runner
    every = np.arange(VOCAB_SIZE)
    params = LogitsParams(processor_args={"no_tokens": {"token_ids": every[every != 7].tolist()}})
    job = Job([1, 2, 3], params, Sampling(temperature=1.0, seed=3), 6)
    [found] = run_jobs(runner, [job], Schedule())
    assert found[1::2] == [7, 7, 7]
    assert len({*found[::2]} - {7}) > 1


@pytest.mark.parametrize("setting", [None, "", " , "])
def test_there_need_not_be_any(setting: str | None) -> None:
    assert not load_processors(setting)


class FailingBeside:
    """Fails beside the forward pass; `apply` leaves the first two tokens."""

    needs_token_ids = False

    def __init__(self, context: object) -> None:
        pass

    def admit(self, row: int, params: LogitsParams, token_ids: Ints, num_prompt: int) -> bool:
        return True

    def release(self, row: int) -> None:
        pass

    def append(self, token_ids: torch.Tensor, lines: Ints, rows: Ints) -> None:
        pass

    def begin_apply(self, rows: Ints) -> None:
        raise KeyError("begin_apply")

    def apply(self, logits: torch.Tensor, lines: Ints, rows: Ints) -> None:
        logits[lines, 2:] = -INF


def test_an_error_beside_the_forward_pass_fails_no_row() -> None:
    processors = pipeline(5, own={"failing": FailingBeside})
    assert not processors.change_rows(changes([admission(0, LogitsParams(min_tokens=1), [0])]))
    processors.begin_apply(np.array([0]))
    assert applied(processors, 0) == [[0, 1]]


BAD, GOOD, OTHER = 1, 2, 3


class Forced:
    """Leaves rows of two tokens and more only token 1, and fails in BAD where a subclass does."""

    needs_token_ids = False

    def __init__(self, context: object) -> None:
        self.applied: list[list[int]] = []
        self.released: list[int] = []

    def admit(self, row: int, params: LogitsParams, token_ids: Ints, num_prompt: int) -> bool:
        return num_prompt > 1

    def release(self, row: int) -> None:
        self.released.append(row)

    def append(self, token_ids: torch.Tensor, lines: Ints, rows: Ints) -> None:
        pass

    def forced_token(self, row: int) -> int | None:
        return 1

    def apply(self, logits: torch.Tensor, lines: Ints, rows: Ints) -> None:
        self.applied.append(rows.tolist())
        logits[lines] = logits[lines].index_fill(1, torch.tensor([0, 2, 3, 4]), -INF)


class FailingRelease(Forced):
    def release(self, row: int) -> None:
        if row == BAD:
            raise KeyError("release")
        super().release(row)


class FailingAppend(Forced):
    def append(self, token_ids: torch.Tensor, lines: Ints, rows: Ints) -> None:
        if BAD in rows:
            raise KeyError("append")


class FailingAppendOnHost(FailingAppend):
    needs_token_ids = True


class FailingForcedToken(Forced):
    def forced_token(self, row: int) -> int | None:
        if row == BAD:
            raise KeyError("forced_token")
        return super().forced_token(row)


class FailingUnready(Forced):
    def unready(self, rows: Ints, wait_s: float) -> list[int]:
        raise KeyError("unready")


class Unready(Forced):
    def unready(self, rows: Ints, wait_s: float) -> list[int]:
        return [row for row in rows.tolist() if row == GOOD]


def guarded(kind: type[Forced]) -> tuple[LogitsPipeline, Forced]:
    """A processor with the rows BAD and GOOD, and its pipeline, in which OTHER is without it."""
    made: list[Forced] = []

    def make(context: object) -> Forced:
        made.append(kind(context))
        return made[0]

    processors = pipeline(5, own={"one": make})
    rows = [admission(row, LogitsParams(), [0, 0]) for row in (BAD, GOOD)]
    other = admission(OTHER, LogitsParams(min_tokens=1), [0])
    assert not processors.change_rows(changes([*rows, other]))
    return processors, made[0]


def test_an_error_in_release_fails_nothing() -> None:
    processors, one = guarded(FailingRelease)
    with capture_logs() as logs:
        assert not processors.change_rows(changes(released=[BAD, GOOD]))
    assert [entry["event"] for entry in logs] == ["a logits processor failed"]
    assert one.released == [GOOD]
    assert not processors.changed(np.array([BAD, GOOD])).size
    again = [admission(row, LogitsParams(), [0, 0]) for row in (BAD, GOOD)]
    assert not processors.change_rows(changes(again))
    assert applied(processors, BAD, GOOD) == [[1], [1]]
    processors.clear()
    assert one.released == [GOOD, GOOD]
    assert not processors.changed(np.array([BAD, GOOD, OTHER])).size


@pytest.mark.parametrize("kind", [FailingAppend, FailingAppendOnHost])
def test_an_error_in_append_fails_its_rows_when_they_sample_again(kind: type[Forced]) -> None:
    processors, one = guarded(kind)
    append(processors, [OTHER, BAD], [1, 1])
    append(processors, [GOOD], [1])
    rows = np.array([BAD, GOOD, OTHER])
    assert processors.forced_rows(rows).tolist() == [GOOD]
    failure = RowFailure(f"the logits processor {kind.__name__} failed: 'append'")
    assert processors.apply(torch.zeros(3, 5), rows) == {BAD: failure}
    assert applied(processors, GOOD, OTHER) == [[1], [0, 1, 2, 3, 4]]
    # It does not see the row again, with a token less than the row has.
    assert one.applied == [[GOOD], [GOOD]]
    again = admission(BAD, LogitsParams(), [0, 0])
    assert not processors.change_rows(changes([again], [BAD]))
    assert applied(processors, BAD, GOOD) == [[1], [1]]


def test_an_error_in_append_ends_a_jump() -> None:
    processors, _ = guarded(FailingAppend)
    assert list(processors.forced_tokens(BAD, 3)) == [1]
    assert list(processors.forced_tokens(GOOD, 3)) == [1, 1, 1]
    assert list(processors.apply(torch.zeros(2, 5), np.array([BAD, GOOD]))) == [BAD]


def test_a_row_is_not_forced_where_that_fails() -> None:
    processors, _ = guarded(FailingForcedToken)
    with capture_logs() as logs:
        assert processors.forced_rows(np.array([BAD, GOOD, OTHER])).tolist() == [GOOD]
        assert not [*processors.forced_tokens(BAD, 2)]
    assert [entry["event"] for entry in logs] == ["a logits processor failed"] * 2
    assert list(processors.forced_tokens(GOOD, 2)) == [1, 1]
    assert applied(processors, BAD, GOOD) == [[1], [1]]


def test_rows_are_ready_for_a_processor_that_fails_to_say_so() -> None:
    processors = pipeline(5, own={"failing": FailingUnready, "unready": Unready})
    rows = [admission(row, LogitsParams(), [0, 0]) for row in (BAD, GOOD)]
    assert not processors.change_rows(changes(rows))
    with capture_logs() as logs:
        assert processors.unready(np.array([BAD, GOOD]), 0) == [GOOD]
    assert [entry["event"] for entry in logs] == ["a logits processor failed"]
    assert applied(processors, BAD, GOOD) == [[1], [1]]
