"""Commands that run a stack on this machine: serve, demo."""

import signal
from typing import Annotated, NoReturn

import typer

from quire.cli.app import integer, one_line_errors
from quire.demo import DEMO_MODEL, run_demo
from quire.launcher.stack import LocalStack
from quire.targets import DEFAULT_TARGET


@one_line_errors()
def serve(
    model: Annotated[str, typer.Argument(help="Folder in Hugging Face format, or a hub id.")],
    workers: Annotated[int, typer.Option(parser=integer, help="Worker processes.")] = 1,
    listen: Annotated[
        str, typer.Option(envvar="QUIRE_GATEWAY_LISTEN", help="Where the API is served.")
    ] = DEFAULT_TARGET,
    redis_url: Annotated[
        str | None,
        typer.Option(
            envvar="QUIRE_SCHEDULER_REDIS_URL", help="A Redis to use; one of its own if absent."
        ),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="What requests call the model; as MODEL if absent.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
    engine: Annotated[
        str | None, typer.Option(help="torch, or sim for workers that only simulate a model.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="auto, float32, bfloat16 or float16.", show_default=False)
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    block_size: Annotated[
        int | None, typer.Option(parser=integer, help="Tokens in a block of the cache.")
    ] = None,
    kv_cache_memory: Annotated[
        str | None, typer.Option(help="Memory of each worker's cache, such as 4GiB.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(parser=integer, help="Longest sequence in tokens.")
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(parser=integer, help="Sequences that run at once on one worker.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the services' logs.")] = False,
) -> None:
    """Serves MODEL until interrupted. Every other setting of a service is its QUIRE_* variable.

    A process that ends is started again, and what it was doing goes on elsewhere or when it is
    back.
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
        redis_url=redis_url,
        served_model_name=served_model_name,
        revision=revision,
        settings={f"QUIRE_WORKER_{k}": str(v) for k, v in worker.items() if v is not None},
        verbose=verbose,
        restart=True,
        on_end=lambda end: typer.echo(f"quire: {end}\nStarting it again ...", err=True),
        on_wait=lambda what: typer.echo(f"Waiting for {what} ...", err=True),
    )
    _interrupt_on_sigterm()
    typer.echo(f"Starting {model} ...", err=True)
    with stack:
        typer.echo(_welcome(model, stack.address, stack.scheduler_address))
        _serve_until_interrupted(stack)


@one_line_errors()
def demo(
    model: Annotated[str, typer.Argument(help="The model to show.")] = DEMO_MODEL,
    workers: Annotated[int, typer.Option(parser=integer, help="Worker processes.")] = 2,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the services' logs.")] = False,
) -> None:
    """Starts a private stack, streams some texts from it, shows its numbers, kills a worker, the
    leading scheduler and a gateway in mid-sentence, shows what that cost, stops it."""
    _interrupt_on_sigterm()
    run_demo(model, num_workers=workers, verbose=verbose)


def _interrupt_on_sigterm() -> None:
    """From here on SIGTERM is what Ctrl-C is, so that a stack is stopped in order.

    SIGINT as well, which a shell has its background jobs ignore.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _serve_until_interrupted(stack: LocalStack) -> None:
    """The first signal ends the wait, so that the stack drains; the next one kills it."""
    try:
        while True:
            signal.pause()
    except KeyboardInterrupt:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stack.kill())
        typer.echo("Draining; interrupt again to stop at once.", err=True)


def _welcome(model: str, address: str, scheduler: str) -> str:
    target = "" if address == DEFAULT_TARGET else f" --target {address}"
    return (
        f"Quire serves {model} on {address}. Try, in another terminal:\n"
        f'  quire generate{target} "Return the number of"\n'
        f"  quire status --target {scheduler}\n"
        "Ctrl-C drains and stops."
    )
