"""The command that puts a server under load and says how it bears it."""

import asyncio
import importlib
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from quire.bench.arrivals import ARRIVALS, arrival_named
from quire.bench.lengths import FORMS, lengths
from quire.bench.objectives import FORM, objectives
from quire.bench.quire_server import QuireServer
from quire.bench.run import Load, Outcome, run
from quire.bench.server import RequestFailed, Server
from quire.bench.table import report_lines
from quire.bench.workload import Workload
from quire.cli.app import ModelName, integer, number, one_line_errors
from quire.cli.bench_progress import Progress
from quire.client import Client
from quire.outputs import Model
from quire.targets import DEFAULT_TARGET

_ANSWER_TIMEOUT_S: Final = 10.0
_SOME_FAILED: Final = 1
_STDOUT: Final = Path("-")


@one_line_errors()
def bench(
    target: Annotated[
        str | None,
        typer.Option(
            envvar="QUIRE_TARGET",
            help=f"The Quire to measure; {DEFAULT_TARGET} if no server is named at all.",
        ),
    ] = None,
    openai: Annotated[
        str | None,
        typer.Option(
            "--openai",
            metavar="URL",
            help="An OpenAI-compatible server to measure, after Quire if that is named, too.",
        ),
    ] = None,
    num_prompts: Annotated[int, typer.Option(parser=integer, help="Requests to send.")] = 64,
    request_rate: Annotated[
        float,
        typer.Option(parser=number, help="Requests that arrive per second; inf: all at once."),
    ] = float("inf"),
    arrival: Annotated[
        str, typer.Option(help=f"The gaps between them: {' or '.join(ARRIVALS)}.")
    ] = ARRIVALS[0],
    prompt_len: Annotated[str, typer.Option(help=f"Tokens of a prompt: {FORMS}.")] = "64-256",
    output_len: Annotated[str, typer.Option(help="Tokens of an output, likewise.")] = "32-96",
    shared_prefix: Annotated[
        int, typer.Option(parser=integer, help="Tokens that all prompts begin with, besides.")
    ] = 0,
    max_concurrency: Annotated[
        int | None,
        typer.Option(parser=integer, help="Most requests under way; the load is then no open one."),
    ] = None,
    goodput: Annotated[
        list[str] | None,
        typer.Option(help=f"Counts requests that kept to it: {FORM}; may be repeated."),
    ] = None,
    temperature: Annotated[
        float, typer.Option(parser=number, help="0 takes the most likely token.")
    ] = 0.0,
    ignore_eos: Annotated[
        bool, typer.Option(help="Write every output to its length; vLLM and others know this.")
    ] = True,
    warmups: Annotated[
        int, typer.Option(parser=integer, help="Requests ahead of the others, uncounted.")
    ] = 1,
    seed: Annotated[int, typer.Option(parser=integer, help="Equal seeds give equal loads.")] = 0,
    model: ModelName = None,
    openai_model: Annotated[
        str | None,
        typer.Option(help="The OpenAI server's name for the model; its first if absent."),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="For the OpenAI server.")
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(
            parser=integer, help="Prompts are of ids below it; Quire's model's if absent."
        ),
    ] = None,
    as_json: Annotated[
        Path | None, typer.Option("--json", help="A file for all figures; - prints them instead.")
    ] = None,
) -> None:
    """Puts a server under load and prints latencies and throughput.

    Prompts are random tokens. Requests arrive whether or not earlier ones have ended, and
    latencies count from then. Exits with 1 if a request failed.
    """
    if as_json is not None and as_json != _STDOUT and not as_json.parent.is_dir():
        raise ValueError(f"--json: there is no folder {as_json.parent}")
    if target is None and openai is None:
        target = DEFAULT_TARGET
    served = None if target is None else _served_model(target, model)
    workload = Workload(
        num_requests=num_prompts,
        prompt_lengths=lengths(prompt_len),
        output_lengths=lengths(output_len),
        token_ids=range(_vocab_size(vocab_size, served)),
        max_model_len=None if served is None else served.max_model_len,
        shared_prefix=shared_prefix,
        seed=seed,
    )
    load = Load(
        workload=workload,
        rate_per_s=request_rate,
        arrival=arrival_named(arrival),
        max_concurrency=max_concurrency,
        num_warmups=warmups,
        objectives=objectives(goodput or []),
    )
    servers: list[Server] = []
    if target is not None:
        servers.append(QuireServer(target, model, temperature, ignore_eos))
    if openai is not None:
        servers.append(_openai_server(openai, openai_model, temperature, ignore_eos, api_key))
    outcome = asyncio.run(_measured(load, servers))
    _tell(outcome, as_json)
    if any(report.num_failed for report in outcome.reports):
        raise typer.Exit(_SOME_FAILED)


async def _measured(load: Load, servers: Sequence[Server]) -> Outcome:
    try:
        return await run(load, servers, Progress(Console(stderr=True)))
    except RequestFailed as failure:
        raise ValueError(f"no request is answered: {failure}") from failure
    finally:
        for server in servers:
            await server.close()


def _served_model(target: str, name: str | None) -> Model:
    """QuireError if nobody answers, ValueError if there is no such model, or several of any."""
    with Client(target, resume_timeout_s=0) as client:
        models = client.list_models(timeout_s=_ANSWER_TIMEOUT_S)
    found = [model for model in models if name in (None, model.name)]
    if len(found) != 1:
        served = ", ".join(model.name for model in models)
        raise ValueError(f"--model: {target} serves {served} (got {name!r})")
    return found[0]


def _openai_server(
    url: str, model: str | None, temperature: float, ignore_eos: bool, api_key: str | None
) -> Server:
    """ValueError, which names the extra, without an HTTP client."""
    if importlib.util.find_spec("httpx2") is None:
        raise ValueError("--openai needs httpx2: pip install 'quire[bench]'")
    # Nobody else needs that client.
    module: Any = importlib.import_module("quire.bench.openai_server")
    named = model or module.served_model(url, api_key)
    server: Server = module.OpenAIServer(url, named, temperature, ignore_eos, api_key)
    return server


def _vocab_size(given: int | None, served: Model | None) -> int:
    if given is not None:
        return given
    if served is None:
        raise ValueError("--vocab-size: an OpenAI server does not tell it, so say it")
    return served.vocab_size


def _tell(outcome: Outcome, as_json: Path | None) -> None:
    document = json.dumps(outcome.as_dict(), indent=1) + "\n"
    if as_json == _STDOUT:
        typer.echo(document, nl=False)
        return
    typer.echo("\n".join(report_lines(outcome.reports)))
    for report in outcome.reports:
        for error, count in report.errors.items():
            typer.echo(f"{report.server}: {count} requests failed: {error}")
    if outcome.equality is not None:
        same = outcome.equality
        typer.echo(f"equal: {same.tokens:.1%} of the tokens, {same.requests:.1%} of the requests")
    if as_json is not None:
        as_json.write_text(document)
