"""`quire chat` through a pipe and in a terminal."""

import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from breaking_gateway import BROKEN, NUM_TOKENS, Gateway, ScriptedCall
from typer.testing import CliRunner

from quire.cli import app


@pytest.fixture
def chat(server):
    """Run the command with lines on standard input."""

    def run(*lines: str, options: tuple[str, ...] = ()):
        runner = CliRunner(env={"QUIRE_TARGET": server.target})
        return runner.invoke(app, ["chat", *options], input="".join(f"{line}\n" for line in lines))

    return run


def sent(server, number: int) -> list[tuple[str, str]]:
    messages = server.inference.requests[number].conversation.messages
    return [(message.role, message.content) for message in messages]


def test_each_line_continues_the_conversation(chat, server):
    result = chat("one two", "", "three")
    assert (result.exit_code, result.stdout) == (0, "ONETWO\nTHREE\n")
    assert sent(server, 0) == [("user", "one two")]
    assert sent(server, 1) == [("user", "one two"), ("assistant", "ONETWO"), ("user", "three")]


def test_reasoning_is_printed_and_not_sent_back(chat, server):
    result = chat("(why) (so) yes no", "(only)", "again")
    assert (result.exit_code, result.stdout) == (0, "(WHY)(SO)\n\nYESNO\n(ONLY)\nAGAIN\n")
    assert sent(server, 1) == [
        *(("user", "(why) (so) yes no"), ("assistant", "YESNO")),
        ("user", "(only)"),
    ]
    # An output without text is no message.
    assert sent(server, 2)[-2:] == [("assistant", "YESNO"), ("user", "again")]
    assert not any(
        message.reasoning for message in server.inference.requests[2].conversation.messages
    )


def test_sampling_options_are_sent(chat, server):
    options = ("--temperature", "0", "--max-tokens", "7", "--stop", "x", "--model", "m")
    assert chat("a", options=options).exit_code == 0
    [request] = server.inference.requests
    params = request.sampling_params
    assert (params.temperature, params.max_tokens, list(params.stop)) == (0, 7, ["x"])
    assert request.model == "m"


def test_the_system_message_is_set_kept_by_reset_and_removed(chat, server):
    options = ("--system", "Be short")
    assert chat("a", "/system Be  long", "b", "/reset", "c", "/system", "d", options=options)
    assert sent(server, 0)[0] == ("system", "Be short")
    assert sent(server, 1) == [
        ("system", "Be  long"),
        *(("user", "a"), ("assistant", "A"), ("user", "b")),
    ]
    assert sent(server, 2) == [("system", "Be  long"), ("user", "c")]
    assert sent(server, 3)[0] == ("user", "c")


def test_quit_ends_and_two_slashes_are_one(chat, server):
    assert chat("//etc", "/quit", "never").exit_code == 0
    assert [sent(server, at)[-1][1] for at in range(len(server.inference.requests))] == ["/etc"]


def test_a_failed_message_is_reported_and_not_part_of_the_conversation(chat, server):
    result = chat("bad", "/nope", "a")
    assert result.exit_code == 1
    assert result.stdout == "A\n"
    first, second = result.stderr.splitlines()
    assert first.startswith("quire: INVALID_ARGUMENT: sampling_params.temperature")
    assert second == "quire: no command /nope; /help lists them"
    assert sent(server, 1) == [("user", "a")]


def test_a_message_that_is_not_utf8_is_reported_and_the_next_one_sent(server):
    result = subprocess.run(
        [sys.executable, "-m", "quire", "chat", "--target", server.target],
        input=b"a\nb\xff\nc\n",
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (result.returncode, result.stdout) == (1, b"A\nC\n")
    assert result.stderr == b"quire: messages: content: no valid UTF-8 at character 1\n"


def test_an_output_goes_on_when_its_connection_breaks():
    breaks, ends = ScriptedCall(BROKEN, after=3), ScriptedCall()
    gateway = Gateway(breaks, ends, breaks)
    try:
        result = CliRunner().invoke(app, ["chat", "--target", gateway.target], input="Hi\nAgain\n")
    finally:
        gateway.stop()
    assert result.exit_code == 0
    assert result.stdout.split() == 2 * [f"0{number}" for number in range(NUM_TOKENS)]
    # Once per message.
    assert result.stderr.count("(the connection is lost); trying again\n") == 2
    assert [type(request).__name__ for request in gateway.requests] == [
        *("StreamGenerateRequest", "ResumeGenerateRequest"),
        *("StreamGenerateRequest", "ResumeGenerateRequest"),
    ]


class Terminal:
    """The command in a pseudo-terminal."""

    def __init__(self, target: str) -> None:
        self._terminal, side = pty.openpty()
        command = [sys.executable, "-m", "quire", "chat", "--target", target]
        environment = {**os.environ, "TERM": "dumb"}
        self.process = subprocess.Popen(
            command, stdin=side, stdout=side, stderr=side, env=environment, start_new_session=True
        )
        os.close(side)
        self._shown = ""

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def expect(self, text: str) -> None:
        """Read until the text is shown, and forget what comes before it."""
        while text not in self._shown:
            self._read()
        self._shown = self._shown.partition(text)[2]

    def interrupt_prompt(self, text: str) -> None:
        """Send SIGINT until the text is shown: Python's readline misses a signal that arrives after
        it has printed the prompt and before it waits for input. Another one follows only after a
        silence, because it may interrupt the next prompt."""
        while text not in self._shown:
            self.process.send_signal(signal.SIGINT)
            while text not in self._shown and select.select([self._terminal], [], [], 2.0)[0]:
                self._read()
        self._shown = self._shown.partition(text)[2]

    def say(self, text: str, response: str, notice: str) -> None:
        """Type a line until the response is shown. An interrupt that was sent before discards it,
        and shows the notice."""
        self.type(text)
        while response not in self._shown:
            if notice in self._shown:
                self._shown = self._shown.partition(notice)[2]
                self.type(text)
            self._read()
        self._shown = self._shown.partition(response)[2]

    def _read(self) -> None:
        self._shown += os.read(self._terminal, 4096).decode().replace("\r\n", "\n")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._terminal)


@pytest.fixture
def terminal(server) -> Iterator[Terminal]:
    terminal = Terminal(server.target)
    yield terminal
    terminal.close()


def test_an_interrupt_ends_the_output_and_ctrl_d_the_program(terminal, server):
    terminal.expect("> ")
    terminal.type("hang\n")
    assert server.inference.hanging.wait(30)
    terminal.process.send_signal(signal.SIGINT)
    terminal.expect("(stopped)")
    # By its call; or by its id, if the interrupt came before the client had the call.
    assert server.inference.released.wait(10)
    terminal.expect("> ")
    notice = "(Ctrl-D or /quit ends)"
    terminal.interrupt_prompt(notice)
    terminal.expect("> ")
    terminal.say("on we go\n", "ONWEGO\n> ", notice)
    # The message that was stopped before any output is not sent again.
    assert sent(server, 1) == [("user", "on we go")]
    terminal.type("\x04")
    assert terminal.process.wait(30) == 0


def test_a_terminal_has_line_editing_with_a_history(terminal, server):
    terminal.expect("> ")
    terminal.type("first\n")
    terminal.expect("FIRST\n> ")
    # The previous line again, and one more word.
    terminal.type("\x10 more\n")
    terminal.expect("FIRSTMORE\n> ")
    terminal.type("/quit\n")
    assert terminal.process.wait(30) == 0


def test_reasoning_is_dim_in_a_terminal(terminal, server):
    terminal.expect("> ")
    terminal.type("(why) yes\n")
    terminal.expect("\x1b[2m(WHY)\x1b[0m\n\nYES\n> ")
    terminal.type("/quit\n")
    assert terminal.process.wait(30) == 0
