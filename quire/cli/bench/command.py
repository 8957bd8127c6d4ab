"""The command that measures a server under load."""

import asyncio
import importlib
import importlib.util
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich import progress
from rich.console import Console

from quire.bench.lengths import FORMS, Lengths, lengths
from quire.bench.load import Listener
from quire.bench.objectives import FORM, ServiceLevelObjectives, objectives
from quire.bench.quire_server import QuireServer
from quire.bench.request_timings import RequestTimings
from quire.bench.run import LoadResult, LoadSpec, run
from quire.bench.server import RequestFailed, Server
from quire.bench.workload import ARRIVALS, Arrival, Workload, parse_arrival
from quire.cli.app import ModelName, given_tls, integer_option, number_option, report_errors
from quire.cli.bench.checks import (
    STDOUT,
    check_counts,
    check_file,
    check_rates,
    check_servers,
    naming,
)
from quire.cli.bench.report import result_lines
from quire.client.client import Client
from quire.client.outputs import Model
from quire.client.targets import DEFAULT_TARGET
from quire.service.tls import TLS

_RESPONSE_TIMEOUT_S: Final = 10.0
_Target = Annotated[
    str | None,
    typer.Option(
        envvar="QUIRE_TARGET",
        help=f"The Quire server to measure; {DEFAULT_TARGET} if neither server is given.",
    ),
]
_OpenAI = Annotated[
    str | None,
    typer.Option(
        "--openai",
        metavar="URL",
        help="An OpenAI-compatible server to measure, after Quire if both are given.",
    ),
]
_RequestRate = Annotated[
    float, number_option("Arrivals per second; inf sends all requests at once.")
]
_Arrival = Annotated[str, typer.Option(help=f"Arrival process: {' or '.join(ARRIVALS)}.")]
_MaxConcurrency = Annotated[
    int | None, integer_option("Limit of requests in flight; makes the load closed-loop.")
]
_Goodput = Annotated[
    list[str] | None,
    typer.Option(help=f"Counts requests within an objective: {FORM}; may be repeated."),
]
_IgnoreEOS = Annotated[
    bool, typer.Option(help="Generate past EOS to the drawn length; uses vLLM's extensions.")
]
_OpenAIModel = Annotated[
    str | None,
    typer.Option(help="The model's name on the OpenAI server; the first listed if absent."),
]
_ApiKey = Annotated[
    str | None, typer.Option(envvar="OPENAI_API_KEY", help="For the OpenAI server.")
]
_QuireApiKey = Annotated[
    str | None,
    typer.Option("--quire-api-key", envvar="QUIRE_API_KEY", help="For the Quire server."),
]
_VocabSize = Annotated[
    int | None, integer_option("Limit of the prompts' token ids; that of Quire's model if absent.")
]
_Scheduler = Annotated[
    str | None,
    typer.Option(
        help="The Quire server's scheduler, for the tokens per step and the drafts of its workers."
    ),
]
_Json = Annotated[
    Path | None, typer.Option("--json", help="A file for all results; - prints them instead.")
]


@report_errors()
def bench(
    context: typer.Context,
    target: _Target = None,
    openai: _OpenAI = None,
    num_prompts: Annotated[int, integer_option("Requests to send.")] = 64,
    request_rate: _RequestRate = math.inf,
    arrival: _Arrival = ARRIVALS[0],
    prompt_len: Annotated[str, typer.Option(help=f"Tokens per prompt: {FORMS}.")] = "64-256",
    output_len: Annotated[str, typer.Option(help="Tokens per output, same forms.")] = "32-96",
    shared_prefix: Annotated[int, integer_option("Tokens of a prefix added to all prompts.")] = 0,
    max_concurrency: _MaxConcurrency = None,
    goodput: _Goodput = None,
    temperature: Annotated[float, number_option("0 takes the most likely token.")] = 0.0,
    ignore_eos: _IgnoreEOS = True,
    warmups: Annotated[int, integer_option("Requests sent first and not counted.")] = 1,
    seed: Annotated[int, integer_option("Equal seeds give equal loads.")] = 0,
    model: ModelName = None,
    openai_model: _OpenAIModel = None,
    api_key: _ApiKey = None,
    quire_api_key: _QuireApiKey = None,
    vocab_size: _VocabSize = None,
    scheduler: _Scheduler = None,
    as_json: _Json = None,
) -> None:
    """Put a server under load and print latencies and throughput.

    Prompts are random tokens. Arrivals are open-loop: they do not wait for earlier requests, and
    latencies count from the arrival. Exits with 1 if a request failed.
    """
    check_counts(num_prompts, shared_prefix, max_concurrency, warmups, vocab_size)
    check_rates(request_rate, temperature)
    check_servers(openai, openai_model)
    check_file(as_json)
    drawn = _drawn(prompt_len, output_len, arrival, goodput or [])
    if target is None and openai is None:
        target = DEFAULT_TARGET
    tls = given_tls(context)
    served = None if target is None else _served_model(target, model, quire_api_key, tls)
    workload = Workload(
        num_requests=num_prompts,
        prompt_lengths=drawn.prompt_lengths,
        output_lengths=drawn.output_lengths,
        token_ids=range(_vocab_size(vocab_size, served)),
        max_model_len=None if served is None else served.max_model_len,
        shared_prefix=shared_prefix,
        seed=seed,
    )
    load = drawn.load(workload, request_rate, max_concurrency, warmups)
    sampling = (temperature, ignore_eos)
    servers: list[Server] = []
    if target is not None:
        servers.append(QuireServer(target, model, *sampling, quire_api_key, tls, scheduler))
    if openai is not None:
        servers.append(_openai_server(openai, openai_model, *sampling, api_key))
    _print_result(asyncio.run(_measure(load, servers)), as_json)


@dataclass(frozen=True)
class _Drawn:
    """How requests are drawn and counted."""

    prompt_lengths: Lengths
    output_lengths: Lengths
    arrival: Arrival
    objectives: ServiceLevelObjectives

    def load(
        self, workload: Workload, rate_per_s: float, max_concurrency: int | None, num_warmups: int
    ) -> LoadSpec:
        return LoadSpec(
            workload=workload,
            rate_per_s=rate_per_s,
            arrival=self.arrival,
            max_concurrency=max_concurrency,
            num_warmups=num_warmups,
            objectives=self.objectives,
        )


def _drawn(prompt_len: str, output_len: str, arrival: str, goodput: list[str]) -> _Drawn:
    """ValueError, with the option, for one that cannot be parsed."""
    with naming("--prompt-len"):
        prompt_lengths = lengths(prompt_len)
    with naming("--output-len"):
        output_lengths = lengths(output_len)
    with naming("--arrival"):
        parsed = parse_arrival(arrival)
    with naming("--goodput"):
        return _Drawn(prompt_lengths, output_lengths, parsed, objectives(goodput))


async def _measure(load: LoadSpec, servers: Sequence[Server]) -> LoadResult:
    try:
        return await run(load, servers, _progress_bar)
    except RequestFailed as failure:
        raise ValueError(f"no request succeeded: {failure}") from failure
    finally:
        for server in servers:
            await server.close()


@contextmanager
def _progress_bar(server: str, num_requests: int) -> Iterator[Listener]:
    """Show ended requests and their tokens on stderr, if that is a terminal."""
    console = Console(stderr=True)
    bar = progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[tokens]:,} tokens"),
        progress.TimeElapsedColumn(),
        console=console,
        # Drawing takes CPU time from the measured load.
        refresh_per_second=4,
        disable=not console.is_terminal,
    )
    task = bar.add_task(server, total=num_requests, tokens=0)
    num_tokens = 0

    def update(timings: RequestTimings) -> None:
        nonlocal num_tokens
        if timings.ended_s:
            bar.advance(task)
        else:
            num_tokens += timings.counts[-1]
            bar.update(task, tokens=num_tokens)

    with bar:
        yield update


def _served_model(target: str, name: str | None, api_key: str | None, tls: TLS | None) -> Model:
    """QuireError if no server responds. ValueError unless exactly one model has the name."""
    with Client(target, api_key=api_key, tls=tls, resume_timeout_s=0) as client:
        models = client.list_models(timeout_s=_RESPONSE_TIMEOUT_S)
    found = [model for model in models if name in (None, model.name)]
    if len(found) != 1:
        served = ", ".join(model.name for model in models)
        raise ValueError(f"--model: {target} serves {served} (got {name!r})")
    return found[0]


def _openai_server(
    url: str, model: str | None, temperature: float, ignore_eos: bool, api_key: str | None
) -> Server:
    """ValueError, with the extra to install, without an HTTP client."""
    if importlib.util.find_spec("httpx2") is None:
        raise ValueError("--openai needs httpx2: pip install 'quire[bench]'")
    # Imported only here, because the client is an optional dependency.
    module: Any = importlib.import_module("quire.bench.openai_server")
    name = model or module.served_model(url, api_key)
    server: Server = module.OpenAIServer(url, name, temperature, ignore_eos, api_key)
    return server


def _vocab_size(given: int | None, served: Model | None) -> int:
    if given is not None:
        return given
    if served is None:
        raise ValueError("--vocab-size: required, because an OpenAI server does not report it")
    return served.vocab_size


def _print_result(result: LoadResult, as_json: Path | None) -> None:
    """Print the results or write them as JSON. Exits with 1 if a request failed."""
    document = json.dumps(result.as_dict(), indent=1) + "\n"
    if as_json == STDOUT:
        typer.echo(document, nl=False)
    else:
        typer.echo("\n".join(result_lines(result)))
        if as_json is not None:
            as_json.write_text(document)
    if any(report.num_failed for report in result.reports):
        raise typer.Exit(1)
