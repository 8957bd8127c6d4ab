"""`quire bench` against a stack with a simulated worker."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripted_openai import Handler
from tiny_models import VOCAB_SIZE, llama
from tiny_tokenizer import save_tokenizer
from typer.testing import CliRunner

from quire.cli import app
from quire.launcher.stack import LocalStack

SETTINGS = {
    "QUIRE_WORKER_ENGINE": "sim",
    "QUIRE_WORKER_SIM_STEP_MS": "1",
    "QUIRE_WORKER_BLOCK_SIZE": "4",
    "QUIRE_WORKER_NUM_SPECULATIVE_TOKENS": "3",
    # Of a smaller rate the share that is accepted would depend on the requests' random seeds.
    "QUIRE_WORKER_SIM_ACCEPTANCE_RATE": "1",
}
SMALL = ("--num-prompts", "12", "--prompt-len", "4-20", "--output-len", "3-9")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """One process per service."""
    folder: Path = tmp_path_factory.mktemp("bench")
    llama().save_pretrained(folder)
    save_tokenizer(folder, VOCAB_SIZE)
    stack = LocalStack(str(folder), served_model_name="tiny", settings=SETTINGS)
    with stack:
        yield stack


@pytest.fixture(scope="module")
def target(stack: LocalStack) -> str:
    return stack.address


def bench(*arguments: str, **environment: str):
    return CliRunner(env=environment).invoke(app, ["bench", *arguments])


def test_results_are_printed(target):
    result = bench("--target", target, *SMALL, "--request-rate", "400", "--goodput", "ttft:5000")
    assert result.exit_code == 0, result.output
    rows = [re.split(r"\s{2,}", line) for line in result.stdout.splitlines()]
    # Thousands have commas.
    lines = {row[0]: row[-1].replace(",", "") for row in rows}
    assert lines["requests"] == "12"
    assert float(lines["output tokens/s"]) > 0
    assert float(lines["goodput, requests/s"]) == float(lines["requests/s"])
    assert float(lines["time to first token, p50, ms"]) > 0
    assert result.stderr == ""


def test_drafts_are_read_from_the_scheduler(stack, target):
    addresses = ("--target", target, "--scheduler", stack.scheduler_address)
    result = bench(*addresses, *SMALL, "--json", "-")
    assert result.exit_code == 0, result.output
    [report] = json.loads(result.stdout)["servers"]
    assert report["draft_acceptance"] == 1
    assert 1.5 < report["tokens_per_step"] < 4
    # Without it there are no such lines.
    assert "accepted drafts" not in bench("--target", target, *SMALL).stdout
    printed = bench(*addresses, *SMALL).stdout
    assert re.search(r"^accepted drafts +\d+%$", printed, re.MULTILINE)
    assert re.search(r"^tokens per row and step +\d\.\d\d$", printed, re.MULTILINE)


def test_a_scheduler_without_response_is_named(target):
    result = bench("--target", target, "--scheduler", "127.0.0.1:9", *SMALL)
    assert result.exit_code == 1
    assert "the scheduler: " in result.stderr


def test_the_json_is_complete_and_equal_seeds_give_equal_loads(target, tmp_path):
    file = tmp_path / "bench.json"
    for place in ("-", str(file)):
        result = bench("--target", target, *SMALL, "--seed", "5", "--json", place)
        assert result.exit_code == 0, result.output
        if place == "-":
            printed = json.loads(result.stdout)
    written = json.loads(file.read_text())
    assert written["workload"] == printed["workload"]
    assert written["workload"]["prompt_lengths"] == "4-20"
    [ours], [again] = written["servers"], printed["servers"]
    assert (ours["server"], ours["num_requests"], ours["errors"]) == ("quire", 12, {})
    assert ours["num_output_tokens"] == again["num_output_tokens"] >= 12 * 3
    assert set(ours["ttft"]) == {"mean", "p50", "p90", "p99", "max"}


def test_every_output_has_its_drawn_length(target):
    lengths = ("--prompt-len", "4", "--output-len", "7")
    result = bench("--target", target, *SMALL[:2], *lengths, "--json", "-")
    assert json.loads(result.stdout)["servers"][0]["num_output_tokens"] == 12 * 7


def test_prompts_are_truncated_to_the_models_length(target):
    result = bench("--target", target, *SMALL[:2], "--prompt-len", "500", "--json", "-")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["servers"][0]["num_output_tokens"] == 12


def test_an_openai_server_receives_the_same_load_and_is_compared(target, url):
    result = bench("--target", target, "--openai", url, *SMALL)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[0].split() == ["quire", "openai", "quire", "/", "openai"]
    assert result.stdout.splitlines()[-1].startswith("equal: ")
    assert len(Handler.bodies) == 1 + 12


def test_an_openai_server_can_be_measured_alone(url):
    result = bench("--openai", url, *SMALL, "--vocab-size", "100", "--json", "-")
    assert result.exit_code == 0, result.output
    [report] = json.loads(result.stdout)["servers"]
    assert (report["server"], report["num_output_tokens"]) == ("openai", 12 * 3)


def test_concurrency_can_be_limited(target):
    result = bench("--target", target, *SMALL, "--max-concurrency", "1", "--warmups", "0")
    assert result.exit_code == 0, result.output


def test_a_failed_request_is_counted_by_its_reason_and_sets_the_exit_status(target):
    wrong = ("--vocab-size", str(100 * VOCAB_SIZE), "--warmups", "0")
    result = bench("--target", target, *SMALL, *wrong)
    assert result.exit_code == 1
    assert "failed requests" in result.stdout
    assert "requests failed: " in result.stdout


def test_a_server_that_fails_the_warm_up_is_reported(target):
    result = bench("--target", target, *SMALL, "--vocab-size", str(1000 * VOCAB_SIZE))
    assert result.exit_code == 1
    assert result.stderr.startswith("quire: no request succeeded: quire: ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--prompt-len", "0"), "--prompt-len: must be at least 1"),
        (("--output-len", "x"), "--output-len: expected N"),
        (("--arrival", "later"), "--arrival: must be poisson or fixed"),
        (("--goodput", "ttft"), "--goodput: expected NAME:MILLISECONDS"),
        (("--request-rate", "0"), "--request-rate: must be above 0 (got 0)"),
        (("--num-prompts", "0"), "--num-prompts: must be at least 1"),
        (("--max-concurrency", "0"), "--max-concurrency: must be at least 1 (got 0)"),
        (("--warmups", "-1"), "--warmups: must not be negative (got -1)"),
        (("--shared-prefix", "-5"), "--shared-prefix: must not be negative (got -5)"),
        (("--json", "nowhere/bench.json"), "--json: there is no folder nowhere"),
        (("--json", "/"), "--json: / is a folder"),
        (("--num-prompts", "99999999999"), "--num-prompts: must be at most 10000000"),
        (("--request-rate", "nan"), "--request-rate: must be above 0 (got nan)"),
        (("--temperature", "-1"), "--temperature: must be 0 or more, and finite (got -1)"),
        (("--temperature", "nan"), "--temperature: must be 0 or more, and finite (got nan)"),
        (("--vocab-size", "0"), "--vocab-size: must be at least 1 (got 0)"),
        (("--openai", "http://a:b"), "--openai: expected http://host:port/v1 (got 'http://a:b')"),
        (("--openai", "localhost"), "--openai: expected http://host:port/v1 (got 'localhost')"),
        (("--openai-model", "x"), "--openai-model: is the model of --openai"),
    ],
)
def test_an_invalid_argument_is_shown_before_a_server_is_contacted(arguments, words):
    result = bench("--target", "127.0.0.1:1", *SMALL, *arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"quire: {words}")


def test_a_model_that_is_not_served_is_named(target):
    result = bench("--target", target, *SMALL, "--model", "other")
    assert result.exit_code == 1
    assert "serves tiny (got 'other')" in result.stderr


def test_an_absent_server_is_reported_with_its_address():
    result = bench("--target", "127.0.0.1:1")
    assert result.exit_code == 1
    assert "no server responds at 127.0.0.1:1" in result.stderr


def test_an_openai_server_alone_needs_a_vocabulary_size():
    result = bench("--openai", "http://127.0.0.1:1")
    assert result.exit_code == 1
    assert "--vocab-size" in result.stderr
