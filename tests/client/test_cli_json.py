"""`--json` of the commands that report something, and shell completion."""

import json
import os
import subprocess
import sys

import pytest
from scripted_scheduler import ScriptedScheduler
from typer.testing import CliRunner

from quire.cli import app
from quire.internal.v1.operations_pb2 import GetStatusResponse, QueueStatus, WorkerStatus


def quire(*arguments: str):
    return CliRunner().invoke(app, arguments)


def test_models(server):
    result = quire("models", "--json", "--target", server.target)
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {
        "models": [
            {
                "name": "scripted",
                "max_model_len": 64,
                "vocab_size": 256,
                "eos_token_ids": [2],
                "has_chat_template": False,
            }
        ]
    }


def test_generate(server):
    command = ("generate", "a b", "--json", "--prompt-logprobs", "1", "--target", server.target)
    result = quire(*command)
    assert result.exit_code == 0
    output = json.loads(result.stdout)
    assert output["outputs"][0]["text"] == "A B"
    assert (output["prompt"], output["usage"]["prompt_tokens"]) == ("a b", 3)
    first, second, third = output["prompt_logprobs"]
    assert first is None
    assert list(second) == ["2", "0"]
    assert third["1"] == {"logprob": -0.5, "rank": 2, "decoded_token": "t1"}


def test_health(server):
    result = quire("health", "--json", "--target", server.target)
    expected = {"target": server.target, "service": "ready", "serving": True, "error": None}
    assert (result.exit_code, json.loads(result.stdout)) == (0, expected)
    server.not_ready()
    result = quire("health", "--json", "--target", server.target)
    assert (result.exit_code, json.loads(result.stdout)) == (1, {**expected, "serving": False})


def test_the_health_of_an_absent_server():
    result = quire("health", "--json", "--target", "127.0.0.1:1")
    assert result.exit_code == 1
    shown = json.loads(result.stdout)
    assert shown["serving"] is False
    assert "no server responds at 127.0.0.1:1" in shown["error"]


def reading(uptime_ms: int, num_tokens: int) -> GetStatusResponse:
    worker = WorkerStatus(
        incarnation=0xABCDEF0123456789,
        address="unix:/run/worker.sock",
        num_running=3,
        num_steps=num_tokens // 10,
        num_scheduled_tokens=num_tokens,
        num_sampled_tokens=num_tokens // 2,
        busy_ns=uptime_ms * 250_000,
        idle_ns=uptime_ms * 750_000,
        num_blocks=10,
        num_free_blocks=6,
        num_cached_blocks=2,
        block_map=bytes(11),
    )
    status = GetStatusResponse(epoch=7, uptime_ms=uptime_ms, num_accepted=5, workers=[worker])
    status.queue.CopyFrom(QueueStatus(num_requests=1, num_tokens=2))
    status.refused_workers.add(address="b:1", reason="another model")
    return status


@pytest.fixture
def scheduler(tmp_path_factory):
    address = f"unix:{tmp_path_factory.mktemp('s')}/s.sock"
    scheduler = ScriptedScheduler(address, [reading(60_000, 1000), reading(62_000, 41_000)])
    yield address
    scheduler.stop()


def test_status(scheduler):
    result = quire("status", "--json", "--once", "--interval", "0.05", "--target", scheduler)
    assert result.exit_code == 0
    shown = json.loads(result.stdout)
    [worker] = shown.pop("workers")
    assert shown == {
        "epoch": 7,
        "uptime_s": 62.0,
        "queue": {"num_requests": 1, "num_tokens": 2},
        "num_accepted": 5,
        "num_refused": 0,
        "tokens_per_s": 20_000.0,
        "refused_workers": [{"address": "b:1", "reason": "another model"}],
    }
    assert worker["incarnation"] == "abcdef0123456789"
    assert (worker["num_running"], worker["num_cached_blocks"]) == (3, 2)
    assert worker["steps_per_s"] == 2000.0
    assert worker["output_tokens_per_s"] == 10_000.0
    assert worker["busy_share"] == 0.25
    assert "block_map" not in worker


def test_status_prints_a_line_per_update(scheduler):
    command = [*(sys.executable, "-m", "quire", "status", "--json", "--interval", "0.05")]
    process = subprocess.Popen([*command, "--target", scheduler], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    first, second = (json.loads(process.stdout.readline()) for _ in range(2))
    process.terminate()
    process.wait(30)
    process.stdout.close()
    assert (first["tokens_per_s"], second["tokens_per_s"]) == (None, 20_000.0)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("quire mod", ["models"]),
        pytest.param("quire status --ta", ["--target"], marks=pytest.mark.slow),
        ("quire serve --gateway.max-live", ["--gateway.max-live-calls"]),
    ],
)
def test_the_shell_completes_commands_and_options(words, expected):
    environment = {
        **os.environ,
        "_QUIRE_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    script = "import sys; sys.argv = ['quire']; from quire.cli import main; main()"
    command = [sys.executable, "-c", script]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert shown.stdout.split() == expected
