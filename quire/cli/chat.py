"""The command `chat`: a conversation with a running server."""

import importlib
from collections.abc import Generator, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Final, TextIO

import typer

from quire.cli import sampling
from quire.cli.app import (
    ApiKey,
    ModelName,
    ResumeTimeout,
    Targets,
    Timeout,
    given_tls,
    opened_stdin,
    report_errors,
)
from quire.cli.connection import RetryReport, connect
from quire.client.client import Client
from quire.client.errors import QuireError
from quire.client.outputs import RequestDelta
from quire.client.requests import RequestOptions
from quire.client.retry_policy import RESUME_TIMEOUT_S
from quire.client.sampling_params import SamplingParams
from quire.client.targets import DEFAULT_TARGET

_DEFAULTS: Final = SamplingParams()
_PROMPT: Final = "> "
_TOO_LONG: Final = "PROMPT_TOO_LONG"
_HELP: Final = """\
/system TEXT  sets the system message; without TEXT, removes it
/reset        begins a new conversation with the same system message
/help         prints this list
/quit         ends the program, as Ctrl-D does
Ctrl-C stops the output. A message that begins with a slash is written with two."""


@dataclass
class Conversation:
    """The messages so far. A system message, if there is one, is sent before them."""

    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def with_message(self, content: str) -> list[dict[str, str]]:
        """The conversation with one more message of the user, which is not recorded."""
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*first, *self.messages, {"role": "user", "content": content}]

    def record(self, content: str, output: str) -> None:
        """Append the user's message and its output. One without any output is not recorded, so
        that roles alternate, as many templates require."""
        if output:
            self.messages.append({"role": "user", "content": content})
            self.messages.append({"role": "assistant", "content": output})


@report_errors()
@sampling.with_sampling_options
def chat(
    context: typer.Context,
    target: Targets = DEFAULT_TARGET,
    api_key: ApiKey = None,
    model: ModelName = None,
    system: sampling.System = None,
    params: SamplingParams = _DEFAULTS,
    priority: sampling.Priority = None,
    timeout: Timeout = None,
    resume_timeout: ResumeTimeout = RESUME_TIMEOUT_S,
) -> None:
    """Chat with the served model. Each line is a message; /help lists the commands.

    Without a terminal, the lines of standard input are the messages, and the program exits with 1
    if one of them failed.
    """
    options: RequestOptions = {"model": model, "priority": priority}
    stdin = opened_stdin()
    is_terminal = stdin.isatty()
    report = RetryReport()
    with connect(target, api_key, given_tls(context), resume_timeout, report) as client:
        repl = ChatRepl(client, params, options, timeout, Conversation(system))
        if is_terminal:
            typer.echo("Chat; /help lists the commands, Ctrl-D ends.", err=True)
        for line in _terminal_lines() if is_terminal else _lines(stdin):
            report.reset()
            if not repl.take(line):
                break
    if repl.has_failed and not is_terminal:
        raise typer.Exit(1)


class ChatRepl:
    """Takes lines: commands, and messages whose output it prints while it is generated."""

    def __init__(
        self,
        client: Client,
        params: SamplingParams,
        options: RequestOptions,
        timeout_s: float | None,
        conversation: Conversation,
    ) -> None:
        # Whether a line has failed.
        self.has_failed = False
        self._client = client
        self._params = params
        self._options = options
        self._timeout_s = timeout_s
        self._conversation = conversation

    def take(self, line: str) -> bool:
        """Handle a line; return whether the conversation goes on."""
        text = line.strip()
        if text.startswith("/") and not text.startswith("//"):
            return self._command(*text[1:].split(maxsplit=1))
        if text:
            self._send(text.removeprefix("/") if text.startswith("//") else text)
        return True

    def _command(self, name: str = "", argument: str = "") -> bool:
        match name:
            case "quit" | "exit":
                return False
            case "reset":
                self._conversation.messages.clear()
            case "system":
                self._conversation.system = argument.strip() or None
            case "help":
                typer.echo(_HELP, err=True)
            case _:
                self._fail(f"no command /{name}; /help lists them")
        return True

    def _send(self, content: str) -> None:
        messages = self._conversation.with_message(content)
        parts: list[str] = []
        try:
            stream = self._client.stream_generate(
                messages, self._params, timeout_s=self._timeout_s, **self._options
            )
            with closing(stream):
                _print_stream(stream, parts)
        except KeyboardInterrupt:
            typer.echo("\n(stopped)", err=True)
        except (QuireError, ValueError) as error:
            # A ValueError is of a line that is not UTF-8.
            if parts:
                typer.echo()
            is_too_long = isinstance(error, QuireError) and error.reason == _TOO_LONG
            hint = "; /reset begins a new conversation" if is_too_long else ""
            self._fail(f"{error}{hint}")
        else:
            typer.echo()
        self._conversation.record(content, "".join(parts))

    def _fail(self, message: str) -> None:
        self.has_failed = True
        typer.echo(f"quire: {message}", err=True)


def _print_stream(stream: Generator[RequestDelta, None, None], parts: list[str]) -> None:
    """Print reasoning and text, and append each text to `parts`, which has what was received before
    a failure. On a terminal reasoning is dim; a blank line ends it."""
    is_reasoning = False
    for delta in stream:
        for output in delta.outputs:
            if output.reasoning:
                is_reasoning = True
                typer.secho(output.reasoning, dim=True, nl=False)
            if output.text:
                if is_reasoning:
                    typer.echo("\n")
                    is_reasoning = False
                parts.append(output.text)
                typer.echo(output.text, nl=False)


def _terminal_lines() -> Iterator[str]:
    """Lines of a terminal, with editing and a history if Python has readline. They are kept in
    memory only, because prompts may be confidential."""
    with suppress(ImportError):
        importlib.import_module("readline")
    while True:
        try:
            yield input(_PROMPT)
        except KeyboardInterrupt:
            typer.echo("\n(Ctrl-D or /quit ends)", err=True)
        except EOFError:
            typer.echo()
            return


def _lines(file: TextIO) -> Iterator[str]:
    """Lines as they arrive."""
    yield from iter(file.readline, "")
