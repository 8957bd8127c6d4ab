"""Commands for operators: health, status, shards, reset-cache."""

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Final

import grpc
import typer

from quire.cli.app import (
    SchedulerTarget,
    Target,
    Timeout,
    given_tls,
    integer,
    number,
    report_errors,
    seconds,
)
from quire.cli.json_output import AsJson, echo_json
from quire.cli.screen import DEFAULT_WIDTH, Screen
from quire.cli.status.shards import shards_json, shards_report
from quire.cli.status.status_json import cluster_status_json
from quire.cli.status.status_report import cluster_report
from quire.client.errors import QuireError
from quire.client.health_probe import is_serving
from quire.client.operations import (
    DEFAULT_SCHEDULER,
    LEADER_FAILS,
    ClusterStatus,
    Operations,
)
from quire.client.targets import DEFAULT_TARGET, check_target
from quire.launcher.services import running_schedulers

_RESPONSE_TIMEOUT_S: Final = 5.0
_MIN_INTERVAL_S, _MAX_INTERVAL_S = 0.05, 86_400.0
# A scheduler that is starting, stopping or paused may respond later.
_TRANSIENT: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


def local_scheduler() -> str:
    """The scheduler of the stack that runs on this machine, or the default address without one.
    ValueError if there are several."""
    running = running_schedulers()
    if len(running) > 1:
        raise ValueError(f"--target: several stacks run on this machine: {', '.join(running)}")
    return running[0] if running else DEFAULT_SCHEDULER


def interval_s(value: str) -> float:
    """Parse the interval between two updates."""
    interval = number(value)
    if not _MIN_INTERVAL_S <= interval <= _MAX_INTERVAL_S:
        limits = f"from {_MIN_INTERVAL_S:g} to {_MAX_INTERVAL_S:g}"
        raise typer.BadParameter(f"must be a number of seconds {limits} (got {value})")
    return interval


def at_least_one(value: str) -> int:
    """Parse a number of shards."""
    count = integer(value)
    if count < 1:
        raise typer.BadParameter(f"must be at least 1 (got {value})")
    return count


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
    as_json: AsJson = False,
) -> None:
    """Exit with 0 if the service at TARGET is serving, else with 1."""
    check_target(target)
    tls, error = given_tls(context), None
    try:
        serves = is_serving(target, service, timeout, tls)
    except QuireError as failure:
        if not as_json:
            raise
        serves, error = False, str(failure)
    if as_json:
        echo_json({"target": target, "service": service, "serving": serves, "error": error})
    elif serves:
        typer.echo("serving")
    else:
        typer.echo(f"quire: {service or 'the process'} at {target} is not serving", err=True)
    if not serves:
        raise typer.Exit(1)


@report_errors()
def status(
    context: typer.Context,
    target: SchedulerTarget = None,
    once: Annotated[
        bool, typer.Option("--once", help="Print the rates of one interval and exit.")
    ] = False,
    interval: Annotated[
        float, typer.Option(parser=interval_s, help="Seconds between two updates.")
    ] = 1.0,
    as_json: AsJson = False,
) -> None:
    """Show the workers, the queue, and the blocks of the workers' caches.

    With --json, one line per update.
    """
    with Operations(target or local_scheduler(), given_tls(context)) as operations:
        if once:
            before = operations.statuses(with_block_maps=False, timeout_s=_RESPONSE_TIMEOUT_S)
            time.sleep(interval)
            now = operations.statuses(with_block_maps=True, timeout_s=_RESPONSE_TIMEOUT_S)
            if as_json:
                echo_json(cluster_status_json(now, before))
            else:
                typer.echo("\n".join(cluster_report(now, before, DEFAULT_WIDTH)))
            return
        with suppress(KeyboardInterrupt):
            if as_json:
                _watch(operations, interval, _echo_status, _echo_failure)
            else:
                screen = Screen(sys.stdout)
                _watch(
                    operations,
                    interval,
                    lambda now, before: screen.show(cluster_report(now, before, screen.width)),
                    lambda error: screen.show([str(error), "Trying again ..."]),
                )


@report_errors()
def shards(
    context: typer.Context,
    num_shards: Annotated[
        int | None,
        typer.Argument(parser=at_least_one, help="Raise the number of shards to this one."),
    ] = None,
    target: SchedulerTarget = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Show the shards, who leads them, and the schedulers; or raise the number of shards.

    Requests continue when the number is raised. It cannot be lowered.
    """
    with Operations(target or local_scheduler(), given_tls(context)) as operations:
        if num_shards is None:
            cluster = operations.cluster(timeout)
            if as_json:
                echo_json(shards_json(cluster))
            else:
                typer.echo("\n".join(shards_report(cluster)))
            return
        operations.set_num_shards(num_shards, timeout)
    if as_json:
        echo_json({"num_shards": num_shards})
    else:
        typer.echo(f"the number of shards is {num_shards}")


@report_errors()
def reset_cache(
    context: typer.Context, target: SchedulerTarget = None, timeout: Timeout = 30.0
) -> None:
    """Remove all cached prefixes from all workers. Running requests continue."""
    with Operations(target or local_scheduler(), given_tls(context)) as operations:
        num_blocks, failures = operations.reset_prefix_caches(timeout)
    typer.echo(f"{sum(num_blocks.values())} blocks removed from the prefix cache")
    for shard, error in failures.items():
        typer.echo(f"quire: caches of shard {shard} not reset: {error}", err=True)
    if failures:
        raise typer.Exit(1)


def _echo_status(now: ClusterStatus, before: ClusterStatus | None) -> None:
    echo_json(cluster_status_json(now, before))


def _echo_failure(error: QuireError) -> None:
    typer.echo(f"quire: {error}; trying again", err=True)


def _watch(
    operations: Operations,
    interval: float,
    show: Callable[[ClusterStatus, ClusterStatus | None], object],
    show_failure: Callable[[QuireError], object],
) -> None:
    """Show each status with the previous one, if there is one, until an error that is final."""
    before: ClusterStatus | None = None
    while True:
        try:
            now = operations.statuses(with_block_maps=True, timeout_s=_RESPONSE_TIMEOUT_S)
        except QuireError as error:
            # Nothing responds at the leader's address, which may not be meant for this host.
            is_unreachable = before is None and error.reason == LEADER_FAILS
            if error.code not in _TRANSIENT or is_unreachable:
                raise
            show_failure(error)
        else:
            show(now, before)
            before = now
        time.sleep(interval)
