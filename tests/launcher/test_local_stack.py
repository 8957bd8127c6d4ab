"""Local stacks: Redis, scheduler, workers and gateway as processes on this machine."""

import gc
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from process_waiting import is_alive, wait_until
from tiny_models import VOCAB_SIZE, llama, save_model
from tiny_tokenizer import save_tokenizer

from quire import LLM, LaunchError, LocalStack, QuireError, SamplingParams

# A worker that imports no torch, where the model's outputs do not matter.
_SIM = {"QUIRE_WORKER_ENGINE": "sim"}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = save_model(llama(), tmp_path_factory.mktemp("llama"))
    save_tokenizer(folder, VOCAB_SIZE)
    return str(folder)


@pytest.fixture
def short_tmp(tmp_path_factory, monkeypatch) -> Path:
    """An empty directory for temporary files."""
    path = tmp_path_factory.mktemp("t")
    monkeypatch.setattr("tempfile.tempdir", str(path))
    return path


@pytest.mark.slow
def test_the_stack_of_an_llm_stops_when_the_object_is_collected(model, short_tmp):
    params = SamplingParams(max_tokens=8, seed=3)
    llm = LLM(model, num_workers=2, block_size=8, engine="sim")
    [directory] = short_tmp.iterdir()
    assert directory.stat().st_mode & 0o777 == 0o700

    outputs = llm.generate(["t1 t2 t3", [4, 5, 6]], params)
    assert [output.usage.completion_tokens for output in outputs] == [8, 8]
    assert llm.generate("t1 t2 t3", params)[0].outputs == outputs[0].outputs
    text = "".join(delta.text for delta in llm.stream("t1 t2 t3", params))
    assert text == outputs[0].outputs[0].text
    with pytest.raises(QuireError, match="temperature") as caught:
        llm.generate("t1", SamplingParams(temperature=-1.0))
    assert caught.value.field == "sampling_params.temperature"

    del llm, caught
    gc.collect()
    assert list(short_tmp.iterdir()) == []


def test_a_killed_worker_of_an_llm_is_restarted_with_a_warning(model, short_tmp, caplog):
    with LLM(model, engine="sim") as llm:
        [directory] = short_tmp.iterdir()
        [worker] = _pids_of("worker_svc", directory)
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: "worker-0 ended by SIGKILL" in caplog.text, "the warning")
        assert len(llm.generate("t1", max_tokens=4)[0].outputs[0].token_ids) == 4
        assert _pids_of("worker_svc", directory) != [worker]
    assert list(short_tmp.iterdir()) == []


def test_a_setting_that_a_service_refuses_is_reported_with_its_value(model, short_tmp):
    with pytest.raises(LaunchError, match=r"worker-0 ended with status 2(.|\n)*sixteen"):
        LLM(model, block_size="sixteen")
    assert list(short_tmp.iterdir()) == []


def test_an_empty_folder_is_reported_as_no_model(tmp_path, short_tmp):
    with pytest.raises(
        LaunchError, match=r"gateway cannot load the model(.|\n)*config.json: no such"
    ):
        LLM(str(tmp_path))
    assert list(short_tmp.iterdir()) == []


def test_the_start_fails_if_redis_is_unreachable(model, short_tmp):
    url = f"unix://{short_tmp}/no-redis.sock"
    stack = LocalStack(model, redis_url=url, redis_timeout_s=0.5, settings=_SIM)
    with pytest.raises(
        LaunchError, match=r"scheduler cannot reach Redis; warnings and errors.*:\n.*no-redis"
    ):
        stack.start()
    assert list(short_tmp.iterdir()) == []


def test_an_invalid_redis_url_is_reported(model, short_tmp):
    with pytest.raises(
        LaunchError, match=r"scheduler ended with status 2(.|\n)*--redis-url.*'foo'"
    ):
        LocalStack(model, redis_url="foo", settings=_SIM).start()


def test_a_stack_that_does_not_run_has_no_address(model):
    with pytest.raises(LaunchError, match="not running"):
        _ = LocalStack(model).address
    with pytest.raises(LaunchError, match="not running"):
        _ = LocalStack(model).scheduler_address


def test_serve_drains_on_a_signal_and_removes_its_files(model, tmp_path):
    command = [
        *(sys.executable, "-m", "quire", "serve", model),
        *("--host", "127.0.0.1", "--port", "0", "--http-port", "0"),
        *("--gateway.max-resume-window-s", "5"),
    ]
    environment = {**os.environ, **_SIM, "TMPDIR": str(tmp_path)}
    server = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        # As a shell starts its background jobs.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert server.stdout is not None
    welcome = server.stdout.readline()
    target = welcome.split(" on ")[1].split()[0].rstrip(".")
    with LLM(target=target) as llm:
        assert llm.generate("t1", SamplingParams(max_tokens=4))[0].usage.completion_tokens == 4
        with pytest.raises(QuireError, match=r"resume_window_s.*5"):
            llm.client.generate("t1", resume_window_s=6)
    # The suggested commands work as printed.
    status = next(line for line in server.stdout if "quire status" in line)
    command = [sys.executable, "-m", *status.split(), "--once", "--interval", "0.05"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "workers 1 " in shown
    server.send_signal(signal.SIGTERM)
    assert server.wait(60) == 0
    server.stdout.close()
    assert list(tmp_path.glob("quire-*")) == []


@pytest.mark.slow
def test_no_service_outlives_a_parent_that_is_killed(model, tmp_path):
    script = """
import sys, time
from quire import LocalStack
stack = LocalStack(sys.argv[1]).start()
print(*stack.pids, flush=True)
time.sleep(600)
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", script, model]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 3
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not any(is_alive(pid) for pid in pids), "the services' ends")


@pytest.mark.slow
def test_a_forked_process_leaves_the_stack_to_its_parent(model, sockets):
    script = """
import os, sys
from quire import LLM
llm = LLM(sys.argv[1], engine="sim")
child = os.fork()
if child == 0:
    sys.exit()
os.waitpid(child, 0)
print(*os.listdir(os.environ["TMPDIR"]))
print(len(llm.generate("t1", max_tokens=4)[0].outputs[0].token_ids))
"""
    environment = {**os.environ, "TMPDIR": str(sockets)}
    command = [sys.executable, "-c", script, model]
    shown = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, timeout=60)
    directory, num_tokens = shown.stdout.splitlines()
    # Its sockets are there, and no files are left when the parent ends.
    assert directory.startswith("quire-stack-")
    assert (shown.returncode, num_tokens, list(sockets.iterdir())) == (0, "4", [])


def _pids_of(module: str, directory: Path) -> list[int]:
    """Processes of a service of the stack with this directory."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes().decode(errors="replace").split("\0")
            if module in words and any(str(directory) in word for word in words):
                found.append(int(path.parent.name))
    return found
