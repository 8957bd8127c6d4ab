"""Commands for operators: health, status, reset-cache."""

import sys
import time
from contextlib import suppress
from typing import Annotated, Final

import grpc
import typer

from quire.cli.app import (
    SchedulerTarget,
    Target,
    Timeout,
    given_tls,
    number,
    report_errors,
    seconds,
)
from quire.cli.screen import DEFAULT_WIDTH, Screen
from quire.cli.status_report import report
from quire.client.errors import QuireError
from quire.client.health_probe import is_serving
from quire.client.operations import DEFAULT_SCHEDULER, LEADER_FAILS, Operations
from quire.client.targets import DEFAULT_TARGET
from quire.internal.v1.operations_pb2 import GetStatusResponse

_RESPONSE_TIMEOUT_S: Final = 5.0
_MIN_INTERVAL_S, _MAX_INTERVAL_S = 0.05, 86_400.0
# A scheduler that is starting, stopping or paused may respond later.
_TRANSIENT: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


def interval_s(value: str) -> float:
    """Parse the interval between two updates."""
    interval = number(value)
    if not _MIN_INTERVAL_S <= interval <= _MAX_INTERVAL_S:
        limits = f"from {_MIN_INTERVAL_S:g} to {_MAX_INTERVAL_S:g}"
        raise typer.BadParameter(f"must be a number of seconds {limits} (got {value})")
    return interval


@report_errors()
def health(
    context: typer.Context,
    target: Target = DEFAULT_TARGET,
    service: Annotated[
        str, typer.Option(help='"ready", a gRPC service, or "" for the process alone.')
    ] = "ready",
    timeout: Annotated[
        float | None, typer.Option(parser=seconds, help="Seconds to wait for a response.")
    ] = 5.0,
) -> None:
    """Exit with 0 if the service at TARGET is serving, else with 1."""
    if not is_serving(target, service, timeout, given_tls(context)):
        typer.echo(f"quire: {service or 'the process'} at {target} is not serving", err=True)
        raise typer.Exit(1)
    typer.echo("serving")


@report_errors()
def status(
    context: typer.Context,
    target: SchedulerTarget = DEFAULT_SCHEDULER,
    once: Annotated[
        bool, typer.Option("--once", help="Print the rates of one interval and exit.")
    ] = False,
    interval: Annotated[
        float, typer.Option(parser=interval_s, help="Seconds between two updates.")
    ] = 1.0,
) -> None:
    """Show a scheduler's workers, its queue, and the blocks of the workers' caches."""
    with Operations(target, given_tls(context)) as operations:
        if once:
            before = operations.status(with_block_maps=False, timeout_s=_RESPONSE_TIMEOUT_S)
            time.sleep(interval)
            now = operations.status(with_block_maps=True, timeout_s=_RESPONSE_TIMEOUT_S)
            typer.echo("\n".join(report(now, before, DEFAULT_WIDTH)))
        else:
            with suppress(KeyboardInterrupt):
                _watch(operations, interval, Screen(sys.stdout))


@report_errors()
def reset_cache(
    context: typer.Context, target: SchedulerTarget = DEFAULT_SCHEDULER, timeout: Timeout = 30.0
) -> None:
    """Remove all cached prefixes from all workers. Running requests continue."""
    with Operations(target, given_tls(context)) as operations:
        num_blocks = operations.reset_prefix_cache(timeout)
    typer.echo(f"{num_blocks} blocks removed from the prefix cache")


def _watch(operations: Operations, interval: float, screen: Screen) -> None:
    before: GetStatusResponse | None = None
    while True:
        try:
            now = operations.status(with_block_maps=True, timeout_s=_RESPONSE_TIMEOUT_S)
        except QuireError as error:
            # Nothing responds at the leader's address, which may not be meant for this host.
            is_unreachable = before is None and error.reason == LEADER_FAILS
            if error.code not in _TRANSIENT or is_unreachable:
                raise
            screen.show([str(error), "Trying again ..."])
        else:
            screen.show(report(now, before, screen.width))
            before = now
        time.sleep(interval)
