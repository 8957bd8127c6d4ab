"""Tables and targets of the engine benchmark, from literal measurements."""

import json
import xml.etree.ElementTree as ElementTree

import pytest

from benchmarks import results
from benchmarks.engines.host import EngineError
from benchmarks.engines.latency import Addresses, latency, loads
from benchmarks.engines.models import SMALL
from benchmarks.engines.plot import plot
from benchmarks.engines.systems import GENERATE, PRODUCTS, QUIRE, RUNNER, VLLM
from benchmarks.engines.throughput import Rounds, left_out_if_foreign, throughput
from benchmarks.engines.vllm_requirements import needed
from benchmarks.engines.worker import worker
from benchmarks.engines.workload import Work
from benchmarks.report import Part, markdown
from benchmarks.results import Measured
from quire.bench.objectives import ServiceLevelObjectives
from quire.bench.report import Equality, Report
from quire.bench.request_timings import RequestTimings
from quire.bench.run import LoadResult

WORK = Work([[1, 2], [3]], [2, 3])
OURS = [[7, 8], [9, 9, 9]]
IDLE_NEVER = [{"busy_s": 1.0, "idle_s": 0.0, "starting_s": 0.0}]
MACHINE = {
    "cores": 2,
    "processor": "a processor",
    "system": "Linux",
    "python": "3.11",
    "torch": "2.13",
    "grpcio": "1",
    "protobuf": "7",
    "redis": "6",
    "redis_server": "6.2",
    "commit": "abc",
    "load_average": 0.5,
    "spin_ms": 3.0,
}


def rounds(**changes) -> Rounds:
    """Two rounds, the second on a machine that is half as fast."""
    results = {
        QUIRE: [{"seconds": 10.0, "outputs": OURS}, {"seconds": 20.0, "outputs": OURS}],
        RUNNER: [{"seconds": 9.5, "outputs": OURS}, {"seconds": 19.0, "outputs": OURS}],
        GENERATE: [
            {"seconds": 20.0, "outputs": [[7, 8], [9, 1, 9]]},
            {"seconds": 40.0, "outputs": OURS},
        ],
        VLLM: [{"seconds": 11.0, "outputs": OURS}, {"seconds": 22.0, "outputs": OURS}],
        PRODUCTS: [
            {"seconds": s, "flops": 6e11, "torch_flops_per_s": rate, "flops_per_s": 2 * rate}
            for s, rate in ((7.0, 1e11), (14.0, 0.5e11))
        ],
        **changes,
    }
    return Rounds({k: v for k, v in results.items() if v is not None}, "1.2.3")


def met(part: Part) -> dict[str, bool]:
    return {target.what: target.met for target in part.targets}


def test_ratios_are_medians_of_the_rounds_ratios():
    assert rounds().ratio(QUIRE, GENERATE) == 2.0
    assert rounds().ratio(QUIRE, VLLM) == pytest.approx(1.1)
    assert rounds(**{}).ratio(QUIRE, RUNNER) == pytest.approx(0.95)


def test_throughput_has_a_row_per_system_and_targets():
    part = throughput(SMALL, WORK, rounds())
    assert [row["tokens_per_s"] for row in part.rows] == pytest.approx(
        [5 / 15, 5 / 14.25, 5 / 30, 5 / 16.5, 5 / 10.5]
    )
    assert [row["equal"] for row in part.rows] == [None, 1.0, 0.6, 1.0, None]
    assert list(met(part).values()) == [False, True, True, False, True]
    assert "vLLM 1.2.3" in part.notes[0]
    assert "0.60 TFLOP" in part.notes[2]
    assert "75 GFLOP/s in float32, which would be 8.00 s" in part.notes[2]
    # The runner takes 14.25 s.
    assert "150 GFLOP/s, which would be 4.00 s; the runner takes 3.56 times that" in part.notes[2]
    assert "| 2.00" in markdown(part)


def test_a_system_that_generated_fewer_tokens_is_an_error():
    found = rounds()
    [*_, last] = found.results[VLLM]
    last["outputs"] = [tokens[:-1] for tokens in last["outputs"]]
    with pytest.raises(EngineError, match="generated 3 tokens instead of 5"):
        throughput(SMALL, WORK, found)


def test_the_runner_has_targets_for_both_measures_of_the_products():
    part = throughput(SMALL, WORK, rounds())
    at_rate, in_steps = part.targets[-2:]
    # 14.25 s over 9 s, the median of 6 and 12, and over 10.5 s.
    assert (at_rate.measured, in_steps.measured) == ("1.58", "1.36")
    assert (at_rate.met, in_steps.met) == (False, True)


def test_without_vllm_the_others_are_compared():
    found = rounds().results
    part = throughput(SMALL, WORK, Rounds({k: v for k, v in found.items() if k != VLLM}, None))
    assert len(part.rows) == 4
    assert len(part.targets) == 4


def test_only_a_foreign_engine_that_does_not_start_is_left_out(capsys):
    with left_out_if_foreign(VLLM):
        raise EngineError("no such library")
    assert capsys.readouterr().out == "vLLM is left out: no such library\n"
    with pytest.raises(EngineError, match="no such library"), left_out_if_foreign(RUNNER):
        raise EngineError("no such library")


def test_the_workers_memory_target_is_weights_pool_and_600_mb():
    results = [
        {"busy_s": 97.0, "idle_s": 3.0, "starting_s": 1.0},
        {"busy_s": 98.0, "idle_s": 2.0, "starting_s": 2.0},
    ]
    most = SMALL.weight_bytes / 1e6 + SMALL.kv_cache_bytes / 1e6 + 600
    part = worker(SMALL, results, 4.0, most)
    assert met(part) == {"peak resident size": True, "ready": True, "idle with a plan": True}
    assert part.rows[0]["beside_mb"] == pytest.approx(600)
    assert part.rows[0]["idle_share"] == pytest.approx(0.025)
    assert part.rows[0]["starting_share"] == pytest.approx(0.015)
    results = [{"busy_s": 97.0, "idle_s": 3.0, "starting_s": 2.5}]
    part = worker(SMALL, results, 10.5, most + 1)
    assert set(met(part).values()) == {False}


def measured(first_s: float, error: str | None = None) -> RequestTimings:
    times = [first_s, first_s + 0.02, first_s + 0.05]
    return RequestTimings(3, 0.0, 0.0, times, [1, 1, 1], [1, 2, 3], None, first_s + 0.05, error)


def result(*firsts_s: float) -> LoadResult:
    [load, *_] = next(iter(loads(SMALL, 2, 1).values()))
    reports = [
        Report.of("s", [measured(first_s)], ServiceLevelObjectives()) for first_s in firsts_s
    ]
    return LoadResult(load, reports, Equality(1.0, 1.0) if len(reports) > 1 else None)


def test_latencies_are_compared_at_the_first_load():
    part = latency(SMALL, {"2.5 per second": [result(0.05, 0.07)], "all at once": [result(9, 1)]})
    assert [row["server"] for row in part.rows] == ["Quire", "vLLM's server"] * 2
    assert part.rows[0]["ttft_p50"] == pytest.approx(50)
    assert (part.rows[0]["equal"], part.rows[1]["equal"]) == (None, 1.0)
    assert len(part.targets) == 4
    assert all(target.met for target in part.targets)
    part = latency(SMALL, {"2.5 per second": [result(0.08, 0.07)]})
    assert list(met(part).values()) == [False, False, True, True]


def test_latencies_of_several_rounds_are_medians():
    part = latency(SMALL, {"a": [result(0.01, 1), result(0.05, 1), result(0.02, 1)]})
    assert part.rows[0]["ttft_p50"] == pytest.approx(20)


def test_quire_alone_has_latencies_and_no_targets():
    part = latency(SMALL, {"a": [result(0.05)]})
    assert (len(part.rows), part.targets) == (1, [])


def test_loads_have_three_rates_and_never_repeat_a_prompt():
    wanted = loads(SMALL, 4, 2)
    assert list(wanted) == ["2.5 per second", "all at once", "one at a time"]
    prompts = [
        tuple(request.prompt_token_ids)
        for rounds in wanted.values()
        for load in rounds
        for request in load.workload.requests()
    ]
    assert len(set(prompts)) == len(prompts)
    assert [rounds[0].max_concurrency for rounds in wanted.values()] == [None, None, 1]


async def test_without_vllm_there_is_one_server():
    servers = Addresses("127.0.0.1:1", None).servers()
    assert list(servers) == ["Quire"]
    await servers["Quire"].close()


def test_lengths_of_bars_are_proportional_to_values():
    drawn = plot([throughput(SMALL, WORK, rounds()), worker(SMALL, IDLE_NEVER, 1, 1)])
    assert drawn is not None
    bars = ElementTree.fromstring(drawn).findall("{*}rect")[1:]
    widths = [float(bar.attrib["width"]) for bar in bars]
    assert len(widths) == 5
    assert widths[0] / widths[2] == pytest.approx(2.0, rel=0.01)
    assert len({bar.attrib["fill"] for bar in bars}) == 2


def test_without_parts_there_is_no_plot():
    assert plot([]) is None


@pytest.fixture
def page(tmp_path, monkeypatch):
    """The results page in a temporary folder."""
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(results, "PAGE", tmp_path / "RESULTS.md")
    return tmp_path / "RESULTS.md"


def test_the_page_shows_plot_table_and_versions(page, tmp_path):
    part = throughput(SMALL, WORK, rounds())
    results.write("engines", Measured(MACHINE, part), [part.name], plot)
    shown = page.read_text()
    [image] = (tmp_path / "results").glob("engines-*.svg")
    assert f"](results/{image.name})" in shown
    assert "python 3.11, torch 2.13, grpcio 1" in shown
    [file] = (tmp_path / "results").glob("engines-*.json")
    assert json.loads(file.read_text())["parts"][part.name]["machine"] == MACHINE


def test_the_page_omits_a_missing_plot(page):
    part = worker(SMALL, IDLE_NEVER, 1.0, 1.0)
    results.write("scheduler", Measured(MACHINE, part), [part.name])
    assert "![" not in page.read_text()


def titled(name: str, title: str) -> Measured:
    return Measured(MACHINE, Part(name, title, [], [], [], []))


def test_the_page_shows_the_newest_result_of_each_part(page, tmp_path):
    order = ["one", "two", "gone"]
    for name in order:
        results.write("kernels", titled(name, f"{name}, first"), order)
    [today] = (tmp_path / "results").glob("*.json")
    earlier = json.loads(today.read_text()) | {"date": "2001-02-03"}
    (today.parent / "kernels-2001-02-03.json").write_text(json.dumps(earlier))
    today.unlink()
    # A part that is not in the newest order is not shown.
    results.write("kernels", titled("two", "two, again"), ["one", "two"])
    headings = [line[4:] for line in page.read_text().splitlines() if line.startswith("### ")]
    assert headings == ["one, first", "two, again"]
    assert "<sub>2001-02-03: 2 cores of a processor" in page.read_text()


def test_the_page_says_what_is_not_measured(page):
    results.render()
    assert "## GPU\n\nNot measured yet" in page.read_text()
    results.write(
        "gpu", Measured(MACHINE | {"device": "a device"}, titled("one", "A").part), ["one"]
    )
    assert "Not measured yet" not in page.read_text()
    assert "a device, 2 cores" in page.read_text()


def test_vllms_requirements_exclude_other_media_and_platforms():
    declared = [
        "torch==2.13.0",
        "torchvision; platform_machine != 's390x'",
        "llguidance<2.0,>=1.3; platform_machine == 'x86_64' or platform_machine == 'aarch64'",
        "regex",
        "fastapi[standard]>=0.115",
        "six>=1.16; python_version > '3.11' and python_version < '3.0'",
        "boto3; extra == 'tensorizer'",
    ]
    assert list(needed(declared)) == [
        "llguidance>=1.7.0,<1.8.0",
        "regex",
        "fastapi[standard]>=0.115",
    ]
