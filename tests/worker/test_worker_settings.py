"""Settings of the cache: what they mean, and what is refused by name."""

import pytest

from worker_svc.settings import WorkerSettings


def test_the_defaults() -> None:
    settings = WorkerSettings.load([])
    assert settings.kv_cache_memory is None
    assert (settings.kv_cache_dtype, settings.attention) == ("auto", "auto")
    assert (settings.gpu_memory_utilization, settings.swap_space) == (0.9, 0)


def test_sizes_have_units() -> None:
    settings = WorkerSettings.load(["--kv-cache-memory=1.5GiB", "--swap-space=4GB"])
    assert (settings.kv_cache_memory, settings.swap_space) == (3 * 2**29, 4 * 10**9)


def test_switches_take_no_value_and_variables_take_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert WorkerSettings.load(["--enforce-eager"]).enforce_eager
    monkeypatch.setenv("QUIRE_WORKER_ENFORCE_EAGER", "true")
    assert WorkerSettings.load([]).enforce_eager
    assert not WorkerSettings.load(["--no-enforce-eager"]).enforce_eager


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--kv-cache-memory", "0"),
        ("--kv-cache-memory", "much"),
        ("--kv-cache-dtype", "int8"),
        ("--gpu-memory-utilization", "0"),
        ("--gpu-memory-utilization", "1.1"),
        ("--gpu-memory-utilization", "nan"),
        ("--swap-space", "-1GiB"),
        ("--swap-space", "9" * 400),
        ("--attention", "xformers"),
        # A thread or a process each.
        ("--threads", "100000"),
        ("--tensor-parallel-size", "100000"),
        ("--pipeline-parallel-size", "100000"),
        ("--max-num-batched-tokens", "1000000000"),
        ("--block-size", "99999999999999999999"),
        ("--address-file", "/absent/address"),
        ("--record", "/absent/plans"),
    ],
)
def test_invalid_values_are_refused(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        WorkerSettings.load([f"{flag}={value}"])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"quire-worker: {flag} / QUIRE_WORKER_")
    assert value in said


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ("10,12", "must have a number for each stage: has 2, and --pipeline-parallel-size is 3"),
        ("10,0,12", "must be the number of layers of each stage, such as 10,12,10"),
        ("10-12-10", "must be the number of layers of each stage, such as 10,12,10"),
    ],
)
def test_each_stage_has_a_number_of_layers(
    layers: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--pipeline-parallel-size=3", "--pipeline-layers"]
    with pytest.raises(SystemExit):
        WorkerSettings.load([*flags, layers])
    setting = "--pipeline-layers / QUIRE_WORKER_PIPELINE_LAYERS"
    assert capsys.readouterr().err == f"quire-worker: {setting}: {words} (got '{layers}')\n"
    assert WorkerSettings.load([*flags, "10,12,10"]).layers_of_stages == (10, 12, 10)


@pytest.mark.parametrize("flag", ["--max-num-seqs=4096", "--max-num-batched-tokens=16"])
def test_a_step_has_a_token_for_each_row(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The scheduler would refuse the worker, which would seem to be ready."""
    with pytest.raises(SystemExit):
        WorkerSettings.load(["--engine=sim", flag])
    said = capsys.readouterr().err
    assert said.startswith("quire-worker: --max-num-batched-tokens / QUIRE_WORKER_")
    assert "must be at least max_num_seqs, which is " in said
    assert WorkerSettings.load(["--max-num-seqs=16", "--max-num-batched-tokens=16"])
