import inspect
import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from quire.cli import app
from quire.cli.inference import OrderedPrinter, models, tokenize
from quire.client.outputs import CompletionDelta
from quire.client.retry_policy import RESUME_TIMEOUT_S


@pytest.fixture
def quire(server):
    """Run the command against the scripted server."""

    def run(*arguments: str, stdin: str | None = None, **environment: str):
        runner = CliRunner(env={"QUIRE_TARGET": server.target, **environment})
        return runner.invoke(app, arguments, input=stdin)

    return run


def test_generate_streams_the_text(quire, server):
    result = quire(
        *("generate", "a b", "--temperature", "0.5", "--top-k", "4", "--top-p", "0.9"),
        *("--min-p", "0.1"),
        *("--max-tokens", "7", "--seed", "3", "--stop", "x", "--stop", "y", "--model", "m"),
    )
    assert (result.exit_code, result.stdout) == (0, "AB\n")
    [request] = server.inference.requests
    params = request.sampling_params
    assert (params.temperature, params.top_k, params.max_tokens, params.seed) == (0.5, 4, 7, 3)
    assert (params.top_p, params.min_p) == pytest.approx((0.9, 0.1))
    assert list(params.stop) == ["x", "y"]
    assert request.model == "m"


def test_every_sampling_option_is_sent(quire, server):
    result = quire(
        *("generate", "a b", "--presence-penalty", "-1", "--frequency-penalty", "0.5"),
        *("--repetition-penalty", "1.5", "--min-tokens", "2", "--typical-p", "0.5"),
        *("--logit-bias", "7=-100", "--logit-bias", "9=2.5", "--allowed-token-id", "4"),
        *("--allowed-token-id", "5", "--bad-word", "x", "--bad-word", "y"),
        *("--truncate-prompt-tokens", "-1", "--no-speculation"),
        *("--stop-token-id", "8", "--stop-token-id", "9", "--ignore-eos"),
    )
    assert (result.exit_code, result.stdout) == (0, "AB\n")
    [request] = server.inference.requests
    params = request.sampling_params
    assert (params.presence_penalty, params.frequency_penalty) == (-1, 0.5)
    assert (params.repetition_penalty, params.min_tokens, params.typical_p) == (1.5, 2, 0.5)
    assert dict(params.logit_bias) == {7: -100, 9: 2.5}
    assert list(params.allowed_token_ids.ids) == [4, 5]
    assert list(params.bad_words) == ["x", "y"]
    assert params.truncate_prompt_tokens == 2**32 - 1
    assert params.HasField("speculation")
    assert not params.speculation
    assert (list(params.stop_token_ids), params.ignore_eos) == ([8, 9], True)


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize(
    ("options", "field", "value"),
    [
        (("--json-schema", '{"type": "null"}'), "json_schema", '{"type": "null"}'),
        (("--regex", "a+"), "regex", "a+"),
        (("--grammar", 'start: "a"'), "grammar", 'start: "a"'),
        (("--structural-tag", "{}"), "structural_tag", "{}"),
        (("--json-object",), "json_object", None),
        (("--choice", "a", "--choice", "b"), "choice", None),
    ],
    ids=str,
)
def test_a_format_is_sent(quire, server, command, options, field, value):
    prompt = ("a",) if command == "generate" else ()
    assert quire(command, *prompt, *options, stdin="a\n").exit_code == 0
    [request] = server.inference.requests
    message = request.sampling_params.structured_output
    assert message.WhichOneof("format") == field
    if value is not None:
        assert getattr(message, field) == value
    if field == "choice":
        assert list(message.choice.texts) == ["a", "b"]


@pytest.mark.parametrize(
    ("option", "field"), [("--json-schema", "json_schema"), ("--grammar",) * 2]
)
def test_a_format_is_read_from_a_file(quire, server, tmp_path, option, field):
    (tmp_path / "format").write_text("é {}")
    assert quire("generate", "a", option, str(tmp_path / "format")).exit_code == 0
    [request] = server.inference.requests
    assert getattr(request.sampling_params.structured_output, field.strip("-")) == "é {}"


def test_a_name_of_no_file_is_no_schema(quire, server):
    for option in ("--json-schema", "--structural-tag"):
        result = quire("generate", "a", option, "city.json")
        assert result.exit_code == 1
        assert f"{option}: 'city.json' is no file, and no JSON: " in result.stderr
    assert server.inference.requests == []


def test_two_formats_and_a_wrong_bias_are_refused(quire):
    result = quire("generate", "a", "--regex", "a", "--json-object")
    assert result.exit_code == 1
    assert "exactly one field must be set (got json_object, regex)" in result.stderr
    for value, message in (("5", "'5' is not ID=VALUE"), ("x=1", "'x' is not an integer")):
        result = quire("generate", "a", "--logit-bias", value)
        assert result.exit_code == 2
        assert message in result.stderr


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--early-stopping", "Invalid value for '--early-stopping': 'x' is not false, true or"),
        ("--length-penalty", "Invalid value for '--length-penalty': 'x' is not a number"),
        ("--stop-token-id", "Invalid value for '--stop-token-id': 'x' is not an integer"),
    ],
)
def test_invalid_values_of_a_beam_search_are_refused_with_the_value(quire, option, message):
    result = quire("beam-search", "a", option, "x")
    assert result.exit_code == 2
    assert message in result.stderr


def test_two_biases_of_a_token_are_refused(quire):
    result = quire("generate", "a", "--logit-bias", "5=1", "--logit-bias", "05=2")
    assert result.exit_code == 1
    assert "logit_bias: the token 5 has two biases" in result.stderr


@pytest.mark.parametrize("option", ["--stream", "--no-stream"])
def test_log_probabilities_of_the_prompt_are_printed(quire, server, option):
    result = quire("generate", "a b", "--prompt-logprobs", "2", option)
    assert result.exit_code == 0
    assert server.inference.requests[-1].sampling_params.prompt_logprobs == 2
    assert result.stdout.splitlines()[:4] == [
        "PROMPT  LOGPROB  RANK  MOST_LIKELY",
        "'t2'     -1.000     3  't0' 0.000, 't1' -0.500",
        "'t1'     -0.500     2  't0' 0.000",
        "",
    ]
    assert result.stdout.splitlines()[4:] == ["AB" if option == "--stream" else "A B"]
    assert "prompt_logprobs: " in quire("generate", "a", "--prompt-logprobs", "-1").stderr


def test_absent_options_are_not_sent(quire, server):
    assert quire("generate", "a").exit_code == 0
    [request] = server.inference.requests
    assert request.sampling_params.ListFields() == []


def test_generate_without_streaming_and_as_a_message(quire, server):
    assert quire("generate", "a b", "--no-stream").stdout == "A B\n"
    assert quire("generate", "Hi", "--chat").exit_code == 0
    [message] = server.inference.requests[-1].conversation.messages
    assert (message.role, message.content) == ("user", "Hi")


@pytest.mark.parametrize(
    ("option", "texts"),
    [("--stream", ["AB", "AABB", "AAABBB"]), ("--no-stream", ["A B", "AA BB", "AAA BBB"])],
)
def test_several_texts_are_printed_one_after_another(quire, server, option, texts):
    result = quire("generate", "a b", "--n", "3", "--priority", "-1", option)
    assert result.exit_code == 0
    assert result.stdout == "[1/3]\n{}\n\n[2/3]\n{}\n\n[3/3]\n{}\n".format(*texts)
    [request] = server.inference.requests
    assert (request.sampling_params.n, request.priority) == (3, -1)


def test_parts_of_later_texts_are_held_back(capsys):
    printer = OrderedPrinter(2)
    printer.add(CompletionDelta(1, "later", 0, [1], None, None))
    assert capsys.readouterr().out == ""
    printer.add(CompletionDelta(0, "now", 0, [1], None, None))
    assert capsys.readouterr().out == "[1/2]\nnow"
    printer.add(CompletionDelta(0, "", 1, [], "length", None))
    assert capsys.readouterr().out == "\n\n[2/2]\nlater"


def test_an_error_is_one_line_and_status_1(quire):
    result = quire("generate", "bad")
    assert result.exit_code == 1
    assert result.stderr == (
        "quire: INVALID_ARGUMENT: sampling_params.temperature: must not be negative (got -1.0)\n"
    )


def test_an_absent_server_is_named(quire):
    result = quire("generate", "a", "--target", "127.0.0.1:1", "--resume-timeout", "0")
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "no server responds at 127.0.0.1:1" in result.stderr


def test_an_absent_server_is_reported_at_the_first_and_the_last_failure(quire):
    result = quire("generate", "a", "--target", "127.0.0.1:1", "--resume-timeout", "0.2")
    assert result.exit_code == 1
    first, last = result.stderr.splitlines()
    assert first.endswith("; trying again")
    assert "no server responds at 127.0.0.1:1" in first
    assert "no server responds at 127.0.0.1:1" in last


def test_an_absent_gateway_is_skipped(quire, server):
    result = quire("generate", "a b", "--target", f"127.0.0.1:1,{server.target}")
    assert (result.exit_code, result.stdout) == (0, "AB\n")


def test_a_number_out_of_range_is_shown(quire):
    result = quire("generate", "a", "--top-k", "-1")
    assert result.exit_code == 1
    assert "top_k: must not be negative (got -1)" in result.stderr


@pytest.mark.parametrize("value", ["nan", "-1"])
@pytest.mark.parametrize("command", [("generate", "a"), ("health",)])
def test_a_timeout_is_a_number_of_seconds(quire, command, value):
    result = quire(*command, "--timeout", value)
    assert result.exit_code == 2
    assert "must be a number of seconds from 0" in result.stderr


def test_an_infinite_timeout_is_none(quire):
    assert quire("generate", "a b", "--timeout", "inf").stdout == "AB\n"
    assert quire("health", "--timeout", "1e12").exit_code == 0


@pytest.mark.parametrize("target", ["127.0.0.1", ""])
@pytest.mark.parametrize("command", [("generate", "a"), ("health",)])
def test_an_invalid_address_is_shown(quire, command, target):
    result = quire(*command, "--target", target)
    assert result.exit_code == 1
    assert result.stderr == f"quire: target: expected host:port or unix:/path (got {target!r})\n"


def test_a_port_beyond_the_last_one_is_refused(quire):
    """gRPC would take it modulo 65536."""
    result = quire("health", "--target", "127.0.0.1:99999")
    assert result.exit_code == 1
    assert "the port must be 1 to 65535 (got '127.0.0.1:99999')" in result.stderr


def test_a_url_is_no_address_for_grpc(quire):
    result = quire("generate", "a", "--target", "http://127.0.0.1:8000")
    assert result.exit_code == 1
    assert "the address for gRPC (got 'http://127.0.0.1:8000')" in result.stderr


def test_a_prompt_is_read_from_standard_input(quire):
    assert quire("generate", "-", stdin="a b\n").stdout == "AB\n"
    result = quire("generate", "-", stdin="")
    assert result.exit_code == 1
    assert "standard input has no prompt" in result.stderr


@pytest.mark.parametrize("command", [models, tokenize])
def test_a_question_without_a_server_ends_before_a_stream_would(command):
    default = inspect.signature(command).parameters["resume_timeout"].default
    assert default < RESUME_TIMEOUT_S / 5


def test_a_prompt_that_is_not_utf8_is_reported(server):
    command = [sys.executable, "-m", "quire", "generate", b"a\xff", "--target", server.target]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert result.stderr == "quire: prompt: no valid UTF-8 at character 1\n"


@pytest.mark.parametrize(
    "command", [("generate", "-"), ("beam-search", "-"), ("chat",), ("run-batch", "-i-", "-o-")]
)
def test_a_closed_input_is_reported(command):
    # The file descriptor is closed, as by `<&-` in a shell.
    code = "import sys; sys.stdin = None; from quire.cli import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", code, *command], capture_output=True, text=True, timeout=60
    )
    assert (result.returncode, result.stderr) == (1, "quire: standard input is closed\n")


def test_a_closed_output_ends_the_command_silently(server):
    prompt = "word " * 4000
    command = [sys.executable, "-m", "quire", "generate", prompt, "--target", server.target]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    assert process.wait(30) == 141
    process.stderr.close()


def test_version(quire):
    result = quire("--version")
    assert result.exit_code == 0
    assert result.stdout.split()[0] == "quire"


@pytest.mark.parametrize(
    ("command", "place"),
    [
        (("generate", "a", "--tls-ca", "ca.pem"), "--tls-ca … generate"),
        (("serve", "m", "--version"), "--version … serve"),
        (("models", "--tls-key=k.pem"), "--tls-key … models"),
    ],
)
def test_an_option_of_all_commands_behind_the_command_is_sent_to_its_place(command, place):
    result = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert f"is given before the command: quire {place} …" in result.stderr


@pytest.mark.parametrize("option", ["--temperature", "--top-k", "--n", "--priority", "--timeout"])
def test_an_invalid_number_is_shown(quire, option):
    result = quire("generate", "a", option, "hot")
    assert result.exit_code == 2
    assert "'hot'" in result.stderr


def test_tokenize(quire):
    assert quire("tokenize", "ab").stdout == "0 97 98\n"
    assert quire("tokenize", "ab", "--no-special-tokens").stdout == "97 98\n"


def test_models(quire):
    result = quire("models")
    assert result.exit_code == 0
    header, model = result.stdout.splitlines()
    assert header.split() == ["MODEL", "MAX_MODEL_LEN", "VOCAB_SIZE", "CHAT_TEMPLATE"]
    assert model.split() == ["scripted", "64", "256", "no"]


def test_health_is_the_exit_status(quire, server):
    assert quire("health").exit_code == 0
    assert quire("health", "--service", "").exit_code == 0
    server.not_ready()
    result = quire("health", "--service", "ready")
    assert result.exit_code == 1
    assert "not serving" in result.stderr
    result = quire("health", "--service", "other")
    assert result.exit_code == 1
    assert result.stderr == f"quire: NOT_FOUND: no service 'other' at {server.target}\n"
    assert quire("health", "--target", "127.0.0.1:1").exit_code == 1


def test_an_interrupt_cancels_the_call(server):
    command = [sys.executable, "-m", "quire", "generate", "hang", "--target", server.target]
    process = subprocess.Popen(command)
    assert server.inference.hanging.wait(30)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    assert server.inference.released.wait(10)


def test_an_interrupt_while_it_is_imported_prints_no_traceback():
    command = [sys.executable, "-X", "importtime", "-m", "quire", "models"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if "quire.service.grpc_verbosity" in line:
            break
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert "Traceback" not in errors
    assert process.returncode == -signal.SIGINT


def test_demo_reports_the_folder_of_its_model(quire, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = quire("demo")
    assert result.exit_code == 1
    assert "demo/model" in result.stderr
