"""Commands that run a stack on this machine: serve, demo."""

import signal
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from quire.cli.app import Verbose, integer_option, report_errors
from quire.client.targets import DEFAULT_TARGET
from quire.demo.demo import DEMO_MODEL, run_demo
from quire.launcher.stack import LocalStack

DEFAULT_HTTP_LISTEN = "127.0.0.1:8000"

_Listen = Annotated[
    str, typer.Option(envvar="QUIRE_GATEWAY_LISTEN", help="The address of the API.")
]
_HttpListen = Annotated[
    str,
    typer.Option(
        envvar="QUIRE_GATEWAY_HTTP_LISTEN",
        help="The address of the OpenAI-compatible HTTP API; empty to serve none.",
    ),
]
_APIKeys = Annotated[
    Path | None,
    typer.Option(
        envvar="QUIRE_GATEWAY_API_KEYS", help="Tenants and their keys; see 'quire keys new'."
    ),
]
_RedisURL = Annotated[
    str | None,
    typer.Option(
        envvar="QUIRE_SCHEDULER_REDIS_URL", help="A running Redis; a private one if absent."
    ),
]
_ServedModelName = Annotated[
    str | None, typer.Option(help="The model's name in requests; MODEL if absent.")
]
_Engine = Annotated[
    str | None, typer.Option(help="torch, or sim for workers that only simulate a model.")
]
_KVCacheMemory = Annotated[
    str | None, typer.Option(help="Memory of each worker's KV cache, such as 4GiB.")
]
_MaxNumSeqs = Annotated[
    int | None, integer_option("Sequences that run concurrently on one worker.")
]


@report_errors()
def serve(
    model: Annotated[str, typer.Argument(help="Folder in Hugging Face format, or a hub id.")],
    workers: Annotated[int, integer_option("Worker processes.")] = 1,
    listen: _Listen = DEFAULT_TARGET,
    http_listen: _HttpListen = DEFAULT_HTTP_LISTEN,
    api_keys: _APIKeys = None,
    redis_url: _RedisURL = None,
    served_model_name: _ServedModelName = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
    engine: _Engine = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    block_size: Annotated[int | None, integer_option("Tokens per block of the KV cache.")] = None,
    kv_cache_memory: _KVCacheMemory = None,
    max_model_len: Annotated[int | None, integer_option("Longest sequence in tokens.")] = None,
    max_num_seqs: _MaxNumSeqs = None,
    verbose: Verbose = False,
) -> None:
    """Serve MODEL until interrupted. All other settings are QUIRE_* environment variables.

    A process that ends is restarted, and its requests continue.
    """
    worker = {
        "ENGINE": engine,
        "DTYPE": dtype,
        "DEVICE": device,
        "BLOCK_SIZE": block_size,
        "KV_CACHE_MEMORY": kv_cache_memory,
        "MAX_MODEL_LEN": max_model_len,
        "MAX_NUM_SEQS": max_num_seqs,
    }
    stack = LocalStack(
        model,
        num_workers=workers,
        gateway_listen=listen,
        http_listen=http_listen or None,
        redis_url=redis_url,
        served_model_name=served_model_name,
        revision=revision,
        settings={
            **{f"QUIRE_WORKER_{k}": str(v) for k, v in worker.items() if v is not None},
            **({} if api_keys is None else {"QUIRE_GATEWAY_API_KEYS": str(api_keys)}),
        },
        verbose=verbose,
        restart=True,
        on_end=lambda end: typer.echo(f"quire: {end}\nRestarting it ...", err=True),
        on_wait=lambda action: typer.echo(f"Waiting for {action} ...", err=True),
    )
    _interrupt_on_sigterm()
    typer.echo(f"Starting {model} ...", err=True)
    with stack:
        typer.echo(_welcome(model, stack.address, stack.scheduler_address, stack.http_addresses))
        _wait_for_interrupt(stack)


@report_errors()
def demo(
    model: Annotated[str, typer.Argument(help="The model to show.")] = DEMO_MODEL,
    workers: Annotated[int, integer_option("Worker processes.")] = 2,
    verbose: Verbose = False,
) -> None:
    """Stream texts from a private stack and print their latencies. Then kill a worker, the
    leading scheduler and a gateway during a stream, and compare the text."""
    _interrupt_on_sigterm()
    run_demo(model, num_workers=workers, verbose=verbose)


def _interrupt_on_sigterm() -> None:
    """Make SIGTERM raise KeyboardInterrupt, so that the stack is drained.

    Also SIGINT, because a shell makes its background jobs ignore it.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _wait_for_interrupt(stack: LocalStack) -> None:
    """Return at the first signal, so that the stack drains; the next one kills it."""
    try:
        while True:
            signal.pause()
    except KeyboardInterrupt:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stack.kill())
        typer.echo("Draining; interrupt again to stop at once.", err=True)


def _welcome(model: str, address: str, scheduler: str, http: list[str]) -> str:
    target = "" if address == DEFAULT_TARGET else f" --target {address}"
    urls = "".join(f" OpenAI's API: http://{one}/v1." for one in http)
    return (
        f"Quire serves {model} on {address}.{urls} Try, in another terminal:\n"
        f'  quire generate{target} "Return the number of"\n'
        f"  quire status --target {scheduler}\n"
        "Ctrl-C drains and stops."
    )
