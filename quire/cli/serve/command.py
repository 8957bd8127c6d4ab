"""Serves a model with a stack on this machine until interrupted."""

import os
import shlex
import signal
import sys
from collections.abc import Mapping
from functools import partial
from typing import Annotated

import typer

from quire.cli.app import Verbose, integer_option, report_errors
from quire.cli.interrupts import interrupt_on_sigterm
from quire.cli.serve.service_flags import settings_help
from quire.client.targets import DEFAULT_TARGET
from quire.launcher.service_settings import service_settings
from quire.launcher.services import check_installed
from quire.launcher.stack import MAX_PROCESSES, LocalStack
from quire.launcher.start_display import StartDisplay
from quire.service.addresses import check_address

DEFAULT_HTTP_LISTEN = "127.0.0.1:8000"

_Listen = Annotated[
    str | None,
    typer.Option(
        envvar="QUIRE_GATEWAY_LISTEN",
        help="The address of the gRPC API: host:port or unix:/path.",
        show_default=DEFAULT_TARGET,
    ),
]
_HttpListen = Annotated[
    str | None,
    typer.Option(
        envvar="QUIRE_GATEWAY_HTTP_LISTEN",
        help="The address of the OpenAI-compatible HTTP API; empty to serve none.",
        show_default=DEFAULT_HTTP_LISTEN,
    ),
]


def _print_settings(requested: bool) -> None:
    if requested:
        with report_errors():
            check_installed()
        typer.echo("\n".join(settings_help(list(service_settings()))).lstrip())
        raise typer.Exit


_HelpSettings = Annotated[
    bool,
    typer.Option(
        "--help-settings",
        callback=_print_settings,
        is_eager=True,
        help="List the flags of all services and exit.",
    ),
]
_Host = Annotated[str | None, typer.Option(help="The host of both addresses.")]
_Port = Annotated[int | None, integer_option("The port of the gRPC API.")]
_HttpPort = Annotated[int | None, integer_option("The port of the HTTP API.")]
_RedisURL = Annotated[
    str | None,
    typer.Option(
        envvar="QUIRE_SCHEDULER_REDIS_URL", help="A running Redis; a private one if absent."
    ),
]
_ServedModelName = Annotated[
    str | None, typer.Option(help="The model's name in requests; MODEL if absent.")
]


@report_errors()
def serve(
    model: Annotated[
        str, typer.Argument(help="Folder in Hugging Face format, a GGUF file, or a hub id.")
    ],
    workers: Annotated[int, integer_option("Worker processes.")] = 1,
    host: _Host = None,
    port: _Port = None,
    http_port: _HttpPort = None,
    listen: _Listen = None,
    http_listen: _HttpListen = None,
    redis_url: _RedisURL = None,
    served_model_name: _ServedModelName = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
    verbose: Verbose = False,
    help_settings: _HelpSettings = False,
    settings: Mapping[str, str] | None = None,
) -> None:
    """Serve MODEL until interrupted. A process that ends is restarted, and its requests continue.

    Every setting of a service is a flag, such as --gateway.max-live-calls, and an environment
    variable, such as QUIRE_GATEWAY_MAX_LIVE_CALLS; --help-settings lists them.
    """
    if workers < 1:
        raise ValueError(f"--workers: must be at least 1 (got {workers})")
    if workers > MAX_PROCESSES:
        raise ValueError(
            f"--workers: must be at most {MAX_PROCESSES} on one machine (got {workers})"
        )
    display = StartDisplay(sys.stderr, partial(typer.echo, err=True), has_logs=verbose)
    stack = LocalStack(
        model,
        num_workers=workers,
        gateway_listen=listen_address("--listen", listen, host, port, DEFAULT_TARGET),
        http_listen=listen_address(
            "--http-listen", http_listen, host, http_port, DEFAULT_HTTP_LISTEN
        )
        or None,
        redis_url=redis_url,
        served_model_name=served_model_name,
        revision=revision,
        settings=settings or {},
        verbose=verbose,
        restart=True,
        on_end=lambda end: typer.echo(f"quire: {end}\nRestarting it ...", err=True),
        on_wait=display.on_wait,
        on_progress=display.on_progress,
    )
    interrupt_on_sigterm()
    typer.echo(f"Starting {model} ...", err=True)
    try:
        stack.start()
    finally:
        display.clear()
    try:
        addresses = (stack.address, stack.scheduler_address, stack.http_addresses)
        typer.echo(welcome(model, *addresses, {**os.environ, **(settings or {})}))
        _wait_for_interrupt(stack)
    finally:
        stack.stop()


def listen_address(
    flag: str, address: str | None, host: str | None, port: int | None, default: str
) -> str:
    """An address from its flag, or from host and port, whose defaults are those of `default`.
    ValueError for both, and for what is no address."""
    if address and (host is not None or port is not None):
        raise ValueError(f"{flag} is an address, so --host and a port cannot be set as well")
    if address is None:
        default_host, _, default_port = default.rpartition(":")
        host = default_host if host is None else host
        bracketed = f"[{host}]" if ":" in host and not host.startswith("[") else host
        address = f"{bracketed}:{default_port if port is None else port}"
    try:
        return check_address(address) if address else address
    except ValueError as error:
        raise ValueError(f"{flag}: {error} (got {address!r})") from error


def _wait_for_interrupt(stack: LocalStack) -> None:
    """Return at the first signal, so that the stack drains; the next one kills it."""
    try:
        while True:
            signal.pause()
    except KeyboardInterrupt:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stack.kill())
        typer.echo("Draining; interrupt again to stop at once.", err=True)


def welcome(
    model: str, address: str, scheduler: str, http: list[str], settings: Mapping[str, str]
) -> str:
    """Where the model is served, and commands that can be copied. `settings` are the variables of
    the services."""
    tls = "QUIRE_GATEWAY_TLS_CERT" in settings
    target = "" if address == DEFAULT_TARGET else f" --target {shlex.quote(address)}"
    key = " --api-key KEY" if "QUIRE_GATEWAY_API_KEYS" in settings else ""
    scheme = "https" if tls else "http"
    urls = "".join(f" OpenAI's API: {scheme}://{one}/v1." for one in http)
    return (
        f"Quire serves {model} on {address}.{urls} Try, in another terminal:\n"
        f'  quire{" --tls" if tls else ""} generate{target}{key} "Return the number of"\n'
        f"  quire status --target {shlex.quote(scheduler)}\n"
        "Ctrl-C drains and stops."
    )
