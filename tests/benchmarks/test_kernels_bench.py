"""The kernel benchmark: requires passing tests, exceeds the caches, and all parts run."""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.kernels import limits, logits, products, report, sampling
from benchmarks.kernels.attention import decode, prefill
from benchmarks.kernels.cache import cache_operations
from benchmarks.kernels.inputs import inputs
from benchmarks.kernels.limits import Limits
from benchmarks.kernels.paged import DenseTensors, PagedTensors, Shape
from benchmarks.report import Part, Target, markdown, part_of

pytestmark = pytest.mark.slow

WORKING_SET = 10**6
PASSING = "def test():\n    pass\n"
FAILING = "def test():\n    raise AssertionError\n"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make all parts small, on one thread."""
    monkeypatch.setattr(limits, "_MATRIX_SIZE", 64)
    monkeypatch.setattr(sampling, "_VOCAB_SIZE", 512)
    monkeypatch.setattr(logits, "_VOCAB_SIZE", 512)
    monkeypatch.setattr(products, "_ROWS", (1, 16))
    sizes = (
        products.Product(64, 32, gated=True),
        products.Product(64, 32, dtype=torch.bfloat16),
        products.Product(64, 32, dtype=torch.bfloat16, bits=4),
    )
    monkeypatch.setattr(products, "_PRODUCTS", sizes)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the parts measured so far; the parts and their tests are replaced by fakes."""
    names: list[str] = []

    def benchmark(name: str, *tests: str, met: bool = True) -> report.Benchmark:
        def measure(_: Limits) -> Part:
            names.append(name)
            return Part(name, f"Title of {name}", [], [], [], [Target("a", "b", "c", met)])

        return report.Benchmark(measure, tests)

    (tmp_path / "test_passes.py").write_text(PASSING)
    (tmp_path / "test_fails.py").write_text(FAILING)
    (tmp_path / "test_none.py").write_text("")
    parts = {
        "good": benchmark("good", "test_passes.py"),
        "bad": benchmark("bad", "test_passes.py", "test_fails.py"),
        "again": benchmark("again", "test_fails.py"),
        "none": benchmark("none", "test_none.py"),
        "gone": benchmark("gone", "test_gone.py"),
        "slow": benchmark("slow", "test_passes.py", met=False),
    }
    monkeypatch.setattr(report, "_TESTS", tmp_path)
    monkeypatch.setattr(report, "PARTS", parts)
    monkeypatch.setattr(report, "cpp_implementations", lambda: ["some"])
    monkeypatch.setattr(report, "keep_freed_memory", lambda: None)
    return names


def run(monkeypatch: pytest.MonkeyPatch, *parts: str) -> int:
    monkeypatch.setattr(sys, "argv", ["benchmarks.kernels", *parts, "--no-write"])
    return report.main()


def test_a_part_is_measured_while_its_tests_pass(
    measured: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "good") == 0
    assert measured == ["good"]
    assert "### Title of good" in capsys.readouterr().out


def test_a_part_whose_tests_fail_is_not_measured_and_the_others_are(
    measured: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "bad", "good") == 1
    assert measured == ["good"]
    out = capsys.readouterr().out
    assert "bad is not measured because tests fail: test_fails.py\n" in out
    assert "Title of bad" not in out


@pytest.mark.parametrize("part", ["none", "gone"])
def test_a_missing_test_counts_as_failed(
    part: str, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(monkeypatch, part) == 1
    assert measured == []


def test_tests_of_several_parts_run_once(
    measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_tests: list[str] = []
    monkeypatch.setattr(report, "_passes", lambda test: run_tests.append(test))
    assert run(monkeypatch, "bad", "again", "good") == 1
    assert (run_tests, measured) == (["test_passes.py", "test_fails.py"], [])


def test_a_missed_target_is_a_failure(measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, "slow") == 1
    assert measured == ["slow"]


def test_without_kernels_nothing_is_measured(
    measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "cpp_implementations", lambda: [])
    assert run(monkeypatch, "good") == 1
    assert measured == []


def test_the_tests_of_every_part_exist() -> None:
    tests = [report._TESTS / test for part in report.PARTS.values() for test in part.tests]
    assert all(test.is_file() for test in tests)


@pytest.mark.parametrize("unit_bytes", [1, 7, 8, 4096])
def test_a_working_set_exceeds_four_caches(unit_bytes: int) -> None:
    machine = limits.limits()
    covered = machine.enough(unit_bytes) * unit_bytes
    assert 4 * limits.cache_bytes() < machine.working_set < covered
    assert covered - unit_bytes <= machine.working_set


def column(part: Part, key: str) -> list[float]:
    return [float(row[key] or 0) for row in part.rows]


def keys(part: Part) -> set[str]:
    return {column.key for column in part.columns}


def assert_shown(part: Part, all_of: Iterable[str]) -> None:
    """Check that every row has these figures, all positive, and that they are columns."""
    for key in all_of:
        assert key in keys(part)
        assert min(column(part, key)) > 0, key
    assert part.title in markdown(part)


def test_writes_and_copies_exceed_the_working_set() -> None:
    part = cache_operations(Limits(WORKING_SET))
    assert_shown(part, ("ms", "mb", "gbs", "of_limit", "of_torch"))
    assert min(column(part, "mb")) > WORKING_SET / 1e6
    what = [str(row["what"]) for row in part.rows]
    assert [w.split()[0] for w in what] == ["kv_write"] * 5 + ["copy_blocks", "swap_blocks"]


def test_decode_is_compared_with_torch_except_in_8_bits() -> None:
    part = decode(Limits(WORKING_SET))
    assert_shown(part, ("ms", "mb", "gbs", "of_limit"))
    assert min(column(part, "mb")) > WORKING_SET / 1e6
    alone = [row["shape"] for row in part.rows if row.get("of_gather") is None]
    assert len(alone) == 2
    assert all("float8" in str(shape) for shape in alone)
    assert alone == [row["shape"] for row in part.rows if row.get("of_contiguous") is None]


def test_prefill_is_measured() -> None:
    assert_shown(
        prefill(Limits(WORKING_SET)), ("ms", "gflop", "gflops", "of_limit", "of_contiguous")
    )


def test_products_are_compared_with_the_limit_of_their_dtype(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured: list[torch.dtype] = []

    def gigaflops(dtype: torch.dtype) -> float:
        measured.append(dtype)
        return 1.0

    monkeypatch.setattr(limits, "_product_gigaflops", gigaflops)
    machine = Limits(WORKING_SET)
    part = products.products(machine)
    assert_shown(part, ("ms", "mflop", "gflops", "mb", "of_limit", "of_torch"))
    assert machine.gigaflops(torch.bfloat16) == 1.0
    assert measured == [torch.float32, torch.bfloat16]


def test_torchs_matrix_product_is_measured() -> None:
    assert Limits(WORKING_SET).gigaflops(torch.bfloat16) > 0


def test_sampling_is_measured() -> None:
    part = sampling.sampling(Limits(WORKING_SET))
    assert_shown(part, ("ms", "mb", "gbs", "of_limit", "of_torch"))
    assert column(part, "mb") == [64 * 512 * 4 / 1e6] * len(part.rows)


def test_changes_of_logits_are_measured() -> None:
    part = logits.logits(Limits(WORKING_SET))
    assert_shown(part, ("ms", "mb", "of_torch"))
    of_logits, of_mask = 32 * 512 * 4 / 1e6, 32 * 512 / 8 / 1e6
    rest = (of_mask, of_mask, of_logits, 0)
    assert column(part, "mb") == pytest.approx([of_logits + more for more in rest])


def test_inputs_report_the_size_of_their_arrays() -> None:
    part = inputs(Limits(WORKING_SET))
    assert_shown(part, ("ms", "tokens", "kb"))
    # Eight numbers of 8 bytes per token; per row a start, a length, and whether it samples.
    assert part.rows[0]["kb"] == pytest.approx((256 * (8 * 8 + 8 + 8 + 1) + 8) / 1000)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_torchs_attention_agrees_with_the_kernel(dtype: torch.dtype) -> None:
    shape = Shape(3, 40, 1, dtype=dtype)
    paged = PagedTensors(shape)
    theirs = paged.gather_and_attend()
    assert theirs.dtype == DenseTensors(shape).attend().dtype == dtype
    assert theirs.shape == DenseTensors(shape).attend().shape
    ours = paged.attend().view(3, 1, 8, 64).transpose(1, 2)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(theirs.float(), ours.float(), atol=tolerance, rtol=tolerance)


def test_results_without_amounts_are_shown() -> None:
    """Older files have other columns."""
    part = part_of(
        {
            "name": "sampling",
            "title": "Tokens from logits",
            "notes": ["A note."],
            "columns": [{"key": "what", "heading": "operation", "form": "s"}],
            "rows": [{"what": "any token"}],
            "targets": [],
        }
    )
    assert "| any token |" in markdown(part)
