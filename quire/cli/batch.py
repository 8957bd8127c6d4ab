"""The command that runs a file of requests: run-batch."""

import asyncio
import importlib
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final, TextIO

import typer
from rich import progress
from rich.console import Console

from quire.batch.lines import BatchOutput, pending_lines, succeeded_lines
from quire.cli.app import (
    ApiKey,
    given_tls,
    integer_option,
    number_option,
    opened_stdin,
    report_errors,
)
from quire.service.tls import TLS

DEFAULT_BASE_URL: Final = "http://127.0.0.1:8000/v1"
_STANDARD: Final = Path("-")

_Input = Annotated[
    Path, typer.Option("--input", "-i", help="The requests as JSON lines; - is standard input.")
]
_Output = Annotated[
    Path, typer.Option("--output", "-o", help="For the outputs; - is standard output.")
]
_BaseURL = Annotated[str, typer.Option(help="The HTTP API, or another server of OpenAI's API.")]
_RetryTimeout = Annotated[
    float,
    number_option("Seconds without any response, after which requests are not sent again."),
]
_Resume = Annotated[
    bool, typer.Option("--resume", help="Keep the output's responses, and run the other requests.")
]
_Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the output.")]


@report_errors()
def run_batch(
    context: typer.Context,
    source: _Input,
    destination: _Output,
    base_url: _BaseURL = DEFAULT_BASE_URL,
    api_key: ApiKey = None,
    max_concurrency: Annotated[int, integer_option("Requests in progress at once.")] = 64,
    retry_timeout: _RetryTimeout = 120.0,
    resume: _Resume = False,
    overwrite: _Overwrite = False,
) -> None:
    """Run a file of requests in OpenAI's batch format.

    Outputs are written as they complete, each with the custom_id of its request. Exits with 1 if a
    request failed.
    """
    if max_concurrency < 1:
        raise ValueError(f"--max-concurrency: must be at least 1 (got {max_concurrency})")
    if not retry_timeout >= 0:
        raise ValueError(f"--retry-timeout: must not be negative (got {retry_timeout})")
    if _is_same_file(source, destination):
        raise ValueError(f"--output: {destination} is the input")
    _check_output(destination, resume, overwrite)
    lines = [line for line in _text(source).split("\n") if line.strip()]
    kept = succeeded_lines(_text(destination)) if resume and destination.is_file() else {}
    pending = pending_lines(lines, kept)
    runner = _runner(base_url, api_key, given_tls(context), max_concurrency, retry_timeout)
    num_failed = 0
    with _opened(destination, kept.values()) as out, _progress_bar(len(pending)) as advance:

        def write(output: BatchOutput) -> None:
            nonlocal num_failed
            num_failed += output.has_failed
            out.write(f"{output.to_json()}\n")
            out.flush()
            advance()

        asyncio.run(runner.run(pending, write, kept.keys()))
    num_done = len(lines) - len(pending)
    done = f", {num_done} done before" if resume else ""
    typer.echo(f"{len(lines)} requests, {num_failed} failed{done}", err=True)
    if num_failed:
        raise typer.Exit(1)


def _check_output(path: Path, resume: bool, overwrite: bool) -> None:
    """ValueError for an output that would be lost, or cannot be resumed."""
    if resume and overwrite:
        raise ValueError("--resume: cannot be used with --overwrite")
    if resume and path == _STANDARD:
        raise ValueError("--resume: standard output cannot be continued")
    has_outputs = path != _STANDARD and path.is_file() and path.stat().st_size > 0
    if has_outputs and not (resume or overwrite):
        choice = "continue it with --resume, or replace it with --overwrite"
        raise ValueError(f"--output: {path} has outputs: {choice}")


def _is_same_file(source: Path, destination: Path) -> bool:
    """Whether the outputs would overwrite the input, also under another name or by a link."""
    if _STANDARD in (source, destination) or not destination.is_file():
        return False
    return source.exists() and source.samefile(destination)


def _runner(
    url: str, api_key: str | None, tls: TLS | None, max_concurrency: int, retry_timeout_s: float
) -> Any:
    """A `BatchRunner`. ValueError, with the extra to install, without an HTTP client."""
    if importlib.util.find_spec("httpx2") is None:
        raise ValueError("run-batch needs httpx2: pip install 'quire[bench]'")
    # Imported only here, because the client is an optional dependency.
    module = importlib.import_module("quire.batch.runner")
    return module.BatchRunner(url, api_key, tls, max_concurrency, retry_timeout_s)


def _text(path: Path) -> str:
    """The lines of a file. Bytes that are not UTF-8 become surrogates, which no line may have. Only
    line feeds separate lines: others, such as U+2028, may stand in JSON texts."""
    data = opened_stdin().buffer.read() if path == _STANDARD else path.read_bytes()
    return data.decode(errors="surrogateescape")


@contextmanager
def _opened(path: Path, kept: Iterable[str]) -> Iterator[TextIO]:
    """The output, of which these lines are kept."""
    if path == _STANDARD:
        yield sys.stdout
        return
    if lines := list(kept):
        _replace(path.resolve(), lines)
    with path.open("a" if lines else "w", encoding="utf-8") as file:
        yield file


def _replace(path: Path, lines: Iterable[str]) -> None:
    """Replace the lines of a file at once, so that an interruption loses none."""
    handle, name = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
    try:
        with open(handle, "w", encoding="utf-8", newline="\n") as file:
            file.writelines(f"{line}\n" for line in lines)
            file.flush()
            os.fsync(handle)
        shutil.copymode(path, name)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


@contextmanager
def _progress_bar(total: int) -> Iterator[Callable[[], object]]:
    """Show ended requests on stderr, if that is a terminal; yields the function to count one."""
    console = Console(stderr=True)
    columns = (
        *(progress.BarColumn(), progress.MofNCompleteColumn()),
        *(progress.TimeElapsedColumn(), progress.TimeRemainingColumn()),
    )
    with progress.Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)
