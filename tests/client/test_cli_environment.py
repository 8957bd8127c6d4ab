"""Environment variables, errors of the system, and the stacks that commands find."""

import re
import socket
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from quire.cli import app
from quire.cli.environment import refuse_unknown_variables
from quire.cli.operations import local_scheduler
from quire.cli.serve.command import welcome
from quire.launcher.directory import PrivateDirectory

ROOT = Path(__file__).resolve().parents[2]


def quire(*arguments: str, **environment: str):
    return CliRunner(env=environment).invoke(app, arguments)


def test_a_mistyped_variable_is_refused_without_its_value():
    result = quire("health", QUIRE_API_KY="secret")
    assert result.exit_code == 2
    assert result.stderr == "quire: QUIRE_API_KY: no such setting; QUIRE_API_KEY is similar\n"


@pytest.mark.parametrize(
    "name", ["QUIRE_WORKER_DTYP", "QUIRE_PORT", "QUIRE_WEB_SERVICE_HOST", "OTHER", "QUIREX"]
)
def test_variables_of_services_compose_and_kubernetes_are_not_refused(name):
    refuse_unknown_variables([name])


def test_variables_of_all_options_and_of_compose_are_known():
    group = typer.main.get_command(app)
    commands = [group, *(group.get_command(None, name) for name in group.list_commands(None))]
    options = {
        variable
        for command in commands
        for option in command.params
        for variable in [getattr(option, "envvar", None)]
        if isinstance(variable, str) and variable.startswith("QUIRE_")
    }
    assert "QUIRE_TARGET" in options
    refuse_unknown_variables(options)
    example = (ROOT / ".env.example").read_text()
    refuse_unknown_variables(re.findall(r"^(QUIRE_\w+)=", example, re.MULTILINE))


@pytest.mark.parametrize(
    "arguments",
    [("replay", "/no/file"), ("explain", "/no/file", "--step", "1")],
)
def test_a_missing_file_has_the_reason_without_a_number(arguments):
    result = quire(*arguments)
    assert result.exit_code in (1, 2)
    assert result.stderr == "quire: /no/file: No such file or directory\n"


def test_a_port_in_use_is_one_line_and_nothing_is_started(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        for flag, flags in (
            ("--port", ("--port", port, "--http-port", "0")),
            ("--http-port", ("--port", "0", "--http-port", port)),
        ):
            result = quire("serve", str(tmp_path), *flags)
            assert result.exit_code == 1
            starting, error = result.stderr.splitlines()
            assert starting.startswith("Starting ")
            message = f"the gateway cannot listen on 127.0.0.1:{port}: Address already in use"
            assert error == f"quire: {message}; choose another port with {flag}"
    taken = f"127.0.0.1:{port}"
    for flags, uses in (
        (("--port", port, "--http-port", port), "gRPC and HTTP"),
        (("--port", port, "--gateway.metrics-listen", taken), "gRPC and the gateway's metrics"),
        (("--http-port", port, "--scheduler.metrics-listen", taken), "HTTP and the scheduler's m"),
    ):
        result = quire("serve", str(tmp_path), "--port", "0", "--http-port", "0", *flags)
        assert result.exit_code == 1
        message = f"cannot listen on {taken} twice: {uses}"
        assert result.stderr.splitlines()[-1].startswith(f"quire: {message}")
    for listen in ("::1:50051", "127.0.0.1:99999", "[::1:50051"):
        result = quire("serve", str(tmp_path), "--listen", listen)
        assert result.stderr.startswith("quire: --listen: must ")
        assert result.stderr.endswith(f"(got {listen!r})\n")


def test_status_finds_the_one_stack_that_runs(tmp_path_factory, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path_factory.mktemp("t")))
    assert local_scheduler() == "127.0.0.1:50052"
    first = PrivateDirectory.make()
    # A stack that is starting.
    assert local_scheduler() == "127.0.0.1:50052"
    (first.path / "scheduler.sock").touch()
    assert local_scheduler() == f"unix:{first.path}/scheduler.sock"
    second = PrivateDirectory.make()
    (second.path / "scheduler.sock").touch()
    with pytest.raises(ValueError, match=r"several stacks run on this machine: unix:.*, unix:"):
        local_scheduler()
    second.remove()
    assert local_scheduler() == f"unix:{first.path}/scheduler.sock"
    first.remove()


def test_the_welcome_has_commands_that_can_be_copied():
    def lines(address: str, **settings: str) -> list[str]:
        text = welcome("m", address, "unix:/a b/s.sock", ["127.0.0.1:8000"], settings)
        return [line.strip() for line in text.splitlines()]

    first, generate, status, _ = lines("127.0.0.1:50051")
    assert first.startswith(
        "Quire serves m on 127.0.0.1:50051. OpenAI's API: http://127.0.0.1:8000"
    )
    assert generate == 'quire generate "Return the number of"'
    assert status == "quire status --target 'unix:/a b/s.sock'"
    first, generate, *_ = lines("h:1", QUIRE_GATEWAY_TLS_CERT="c", QUIRE_GATEWAY_API_KEYS="k")
    assert "https://127.0.0.1:8000/v1" in first
    assert generate == 'quire --tls generate --target h:1 --api-key KEY "Return the number of"'
