"""`quire run-batch` against a scripted HTTP server."""

import json
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from scripted_api import Api, serve_api
from typer.testing import CliRunner

from quire.batch import runner
from quire.cli import app


@pytest.fixture
def api() -> Iterator[Api]:
    with serve_api() as api:
        yield api


def request(custom_id: str, prompt: str, **body: Any) -> str:
    return line(custom_id=custom_id, body={"prompt": prompt, **body})


def line(**fields: Any) -> str:
    whole = {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {}}
    return json.dumps({**whole, **fields})


@pytest.fixture
def run_batch(api, tmp_path) -> Callable[..., tuple[int, list[Any], str]]:
    """Run lines from file to file; return exit status, outputs and stderr."""

    def run(*lines: str, options: tuple[str, ...] = ()):
        source, destination = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        source.write_text("\n".join(lines) + "\n", errors="surrogateescape")
        files = ("-i", str(source), "-o", str(destination))
        result = CliRunner().invoke(app, ["run-batch", *files, "--base-url", api.url, *options])
        outputs = [json.loads(one) for one in destination.read_text().split("\n") if one]
        return result.exit_code, outputs, result.stderr

    return run


def by_id(outputs: list[Any]) -> dict[str, Any]:
    return {output["custom_id"]: output for output in outputs}


def test_both_urls_in_openais_format(run_batch, api):
    messages = [{"role": "user", "content": "Grüße"}]
    status, outputs, stderr = run_batch(
        request("a", "one", max_tokens=3),
        "",
        line(custom_id="b", url="/v1/chat/completions", body={"messages": messages}),
        options=("--api-key", "k"),
    )
    assert (status, stderr) == (0, "2 requests, 0 failed\n")
    found = by_id(outputs)
    assert list(found["a"]) == ["id", "custom_id", "response", "error"]
    assert found["a"]["error"] is None
    assert found["a"]["response"] == {
        "status_code": 200,
        "request_id": found["a"]["id"],
        "body": {"path": "/v1/completions", "text": "one"},
    }
    assert found["b"]["response"]["body"] == {"path": "/v1/chat/completions", "text": "Grüße"}
    assert found["a"]["id"] != found["b"]["id"]
    assert {"prompt": "one", "max_tokens": 3} in api.bodies
    assert api.authorizations == {"Bearer k"}


@pytest.mark.parametrize(
    ("wrong", "custom_id", "message"),
    [
        ("{", None, "no valid JSON: Expecting property name"),
        ("[1]", None, "the line: Input should be a valid dictionary"),
        (line(custom_id=5), None, "custom_id: Input should be a valid string"),
        (line(method="GET"), "c", "method: Input should be 'POST'"),
        (line(url="/v1/embeddings"), "c", "url: Input should be '/v1/chat/completions' or"),
        (line(body=[]), "c", "body: Input should be a valid dictionary"),
        (line(more=1), "c", "more: Extra inputs are not permitted"),
        (line(body={"stream": True}), "c", "body.stream: must be absent or false in a batch"),
        (request("good", "again"), "good", "custom_id: another line has it"),
        ("[" * 100_000, None, "no valid JSON: "),
        (b"\xff{}".decode(errors="surrogateescape"), None, "no valid UTF-8"),
        (line(body={"prompt": "\ud800"}), "c", "body: has a number or a character that JSON"),
        (line(body={"prompt": "x"})[:-2] + ', "seed": 1e400}}', "c", "body: has a number or"),
        (line(custom_id="\ud800"), "\ud800", "custom_id: Input should be a valid string"),
    ],
)
def test_a_wrong_line_has_an_error_and_the_others_go_on(run_batch, wrong, custom_id, message):
    status, outputs, stderr = run_batch(request("good", "x"), wrong, request("last", "y"))
    assert (status, stderr) == (1, "3 requests, 1 failed\n")
    [failed] = [output for output in outputs if output["response"] is None]
    assert failed["custom_id"] == custom_id
    assert failed["error"]["code"] == "invalid_line"
    assert failed["error"]["message"].startswith(message)
    assert {o["custom_id"] for o in outputs if o["response"]} == {"good", "last"}


def test_a_refused_request_keeps_the_servers_response(run_batch):
    status, [output], _ = run_batch(request("a", "refused"))
    assert status == 1
    assert output["error"] is None
    assert output["response"]["status_code"] == 400
    assert output["response"]["body"] == {"error": {"message": "no"}}


def test_a_response_that_is_not_json_is_an_error(run_batch):
    status, [output], _ = run_batch(request("a", "text"))
    assert status == 1
    assert output["error"]["code"] == "no_response"
    assert output["error"]["message"] == "status 200, and no JSON: '<html>'"


@pytest.mark.parametrize("prompt", ["full", "drop"])
def test_a_transient_failure_is_tried_again_under_the_same_id(run_batch, api, prompt):
    status, [output], _ = run_batch(request("a", prompt))
    assert status == 0
    assert api.attempts == {output["id"]: 2}


def test_requests_are_given_up_without_any_response(run_batch):
    status, [output], _ = run_batch(request("a", "never"), options=("--retry-timeout", "0.3"))
    assert status == 1
    assert output["error"]["code"] == "no_response"


def test_a_long_request_may_lose_its_connection_again(run_batch, api, monkeypatch):
    """Its failures are further apart than the timeout; each attempt had a server meanwhile."""
    monkeypatch.setattr(runner, "_REACHED_S", 0.3)
    status, [output], _ = run_batch(request("a", "long"), options=("--retry-timeout", "0.3"))
    assert status == 0
    assert api.attempts == {output["id"]: 3}


def test_a_request_whose_connections_all_break_late_fails(run_batch, api, monkeypatch):
    """A proxy ends a response that takes longer than its own limit, at each attempt."""
    monkeypatch.setattr(runner, "_REACHED_S", 0.08)
    monkeypatch.setattr(runner, "_FIRST_BACKOFF_S", 0.01)
    status, [output], _ = run_batch(request("a", "late"), options=("--retry-timeout", "0.1"))
    assert status == 1
    assert output["error"]["code"] == "no_response"
    assert api.attempts == {output["id"]: 6}


def test_requests_run_concurrently_up_to_the_limit(run_batch, api):
    lines = [request(str(number), "barrier 3") for number in range(6)]
    status, outputs, _ = run_batch(*lines, options=("--max-concurrency", "3"))
    # A barrier of three ends only if three requests wait at once.
    assert (status, len(outputs)) == (0, 6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--max-concurrency", "0"), "--max-concurrency: must be at least 1 (got 0)"),
        (("--retry-timeout", "-1"), "--retry-timeout: must not be negative (got -1.0)"),
        (("--base-url", "localhost"), "--base-url: expected http://host:port/v1"),
        (("--base-url", "http://a:99999/v1"), "--base-url: expected http://host:port/v1"),
        (("--resume",), "--resume: standard output cannot be continued"),
        (("--resume", "--overwrite"), "--resume: cannot be used with --overwrite"),
        (("--api-key", "é"), "api_key: must be one word of visible ASCII characters"),
    ],
)
def test_wrong_options_are_refused(tmp_path, options, message):
    source = tmp_path / "in.jsonl"
    source.write_text(request("a", "x"))
    result = CliRunner().invoke(app, ["run-batch", "-i", str(source), "-o", "-", *options])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"quire: {message}")


def test_the_input_is_not_overwritten(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text(request("a", "x"))
    result = CliRunner().invoke(app, ["run-batch", "-i", str(source), "-o", str(source)])
    assert result.exit_code == 1
    assert source.read_text() == request("a", "x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(source)
    for name in ("folder/../in.jsonl", "link"):
        destination = str(tmp_path / name)
        result = CliRunner().invoke(app, ["run-batch", "-i", str(source), "-o", destination])
        assert result.stderr == f"quire: --output: {destination} is the input\n"
        assert source.read_text() == request("a", "x")


def test_outputs_are_not_overwritten_unasked(run_batch, api, tmp_path):
    destination = tmp_path / "out.jsonl"
    destination.touch()
    # An empty file has no outputs.
    assert run_batch(request("a", "one"))[0] == 0
    before = destination.read_text()
    status, _, stderr = run_batch(request("a", "two"))
    choice = "continue it with --resume, or replace it with --overwrite"
    assert (status, stderr) == (1, f"quire: --output: {destination} has outputs: {choice}\n")
    assert destination.read_text() == before
    assert len(api.bodies) == 1
    status, [output], stderr = run_batch(request("a", "two"), options=("--overwrite",))
    assert (status, stderr) == (0, "1 requests, 0 failed\n")
    assert output["response"]["body"]["text"] == "two"


def test_an_interrupted_batch_is_resumed(run_batch, api, tmp_path):
    destination, link = tmp_path / "results" / "out.jsonl", tmp_path / "out.jsonl"
    destination.parent.mkdir()
    link.symlink_to(destination)
    done = [request("a", "one\u2028"), request("b", "two"), request("elsewhere", "x")]
    assert run_batch(*done, request("c", "refused"), "{")[0] == 1
    finished = [one for one in destination.read_text().split("\n") if '"status_code": 200' in one]
    half = finished[0].replace('"a"', '"d"').replace('"b"', '"d"')
    with destination.open("ab") as file:
        file.write(b'5\n{"custom_id": "d", "response": null}\n\xff\n' + half.encode())
    destination.chmod(0o640)
    api.bodies.clear()
    pending = [request("c", "three"), request("d", "four")]
    status, outputs, stderr = run_batch(*done[:2], *pending, options=("--resume",))
    assert (status, stderr) == (0, "4 requests, 0 failed, 2 done before\n")
    assert sorted(body["prompt"] for body in api.bodies) == ["four", "three"]
    assert sorted(output["custom_id"] for output in outputs) == ["a", "b", "c", "d", "elsewhere"]
    # The kept lines stand before the others, as they were.
    assert destination.read_text().startswith("\n".join(finished) + "\n")
    assert link.is_symlink()
    assert destination.stat().st_mode & 0o777 == 0o640
    assert list(destination.parent.iterdir()) == [destination]


def test_a_batch_without_outputs_is_resumed_from_its_beginning(run_batch):
    status, outputs, stderr = run_batch(request("a", "one"), options=("--resume",))
    assert (status, len(outputs), stderr) == (0, 1, "1 requests, 0 failed, 0 done before\n")


def test_a_second_line_with_a_custom_id_is_wrong_when_it_is_resumed_too(run_batch, api):
    lines = [request("a", "one"), request("a", "two")]
    run_batch(*lines)
    status, outputs, stderr = run_batch(*lines, options=("--resume",))
    assert (status, stderr) == (1, "2 requests, 1 failed, 1 done before\n")
    assert [output["error"] and output["error"]["code"] for output in outputs] == [
        *(None, "invalid_line"),
    ]
    assert len(api.bodies) == 1


def test_an_output_is_complete_if_its_resumption_fails(run_batch, tmp_path, monkeypatch):
    destination = tmp_path / "out.jsonl"
    run_batch(request("a", "one"))
    before = destination.read_text()

    def fail(*_):
        raise OSError("interrupted")

    monkeypatch.setattr("os.replace", fail)
    status, _, stderr = run_batch(request("a", "one"), options=("--resume",))
    assert (status, stderr) == (1, "quire: interrupted\n")
    assert destination.read_text() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_a_body_that_is_nested_too_deeply_leaves_the_others(run_batch):
    """At each depth it can be read and not be sent, or sent, or not even be read."""
    # Newer Pythons read about 10,000 levels, whatever their limit.
    depths = [*range(sys.getrecursionlimit() // 2, sys.getrecursionlimit(), 7), 100_000]
    deep = [line(custom_id=str(d), body={"prompt": "x"})[:-2] for d in depths]
    deep = [f'{one}, "a": {"[" * d}{"]" * d}}}}}' for one, d in zip(deep, depths, strict=True)]
    status, outputs, _ = run_batch(request("good", "x"), *deep, request("last", "y"))
    assert (status, len(outputs)) == (1, len(depths) + 2)
    failed = [output["error"]["message"] for output in outputs if output["response"] is None]
    assert all("nested too deeply" in one or "recursion" in one for one in failed)
    assert {"good", "last"} <= {o["custom_id"] for o in outputs if o["response"]}


def test_standard_input_and_output(api):
    files = ["run-batch", "-i", "-", "-o", "-", "--base-url", api.url]
    result = CliRunner().invoke(app, files, input=request("a", "one\u2028two"))
    assert result.exit_code == 0
    assert json.loads(result.stdout)["response"]["body"]["text"] == "one\u2028two"


def test_a_terminal_shows_the_progress(api):
    terminal, side = pty.openpty()
    command = [*(sys.executable, "-m", "quire", "run-batch"), *("--base-url", api.url)]
    process = subprocess.Popen(
        [*command, "-i", "-", "-o", "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=side,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80"},
    )
    os.close(side)
    shown = bytearray()

    def read() -> None:
        try:
            while part := os.read(terminal, 4096):
                shown.extend(part)
        except OSError:
            """The process has ended."""

    reader = threading.Thread(target=read)
    reader.start()
    process.communicate("\n".join([request("a", "x"), request("b", "y")]).encode(), timeout=60)
    reader.join()
    os.close(terminal)
    assert process.returncode == 0
    assert b"2/2" in shown
    assert b"2 requests, 0 failed" in shown
