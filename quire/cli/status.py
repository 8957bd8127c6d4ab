"""The command that shows what a scheduler and its workers do."""

import sys
import time
from contextlib import suppress
from typing import Annotated, Final

import grpc
import typer

from quire.cli.app import SchedulerTarget, number, one_line_errors
from quire.cli.screen import DEFAULT_WIDTH, Screen
from quire.cli.status_report import report
from quire.errors import QuireError
from quire.internal.v1.operations_pb2 import GetStatusResponse
from quire.operations import DEFAULT_SCHEDULER, Operations

_ANSWER_TIMEOUT_S: Final = 5.0
_MIN_INTERVAL_S, _MAX_INTERVAL_S = 0.05, 86_400.0
# A scheduler that starts, stops or hangs may answer later.
_PASSING: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


def interval_s(value: str) -> float:
    seconds = number(value)
    if not _MIN_INTERVAL_S <= seconds <= _MAX_INTERVAL_S:
        limits = f"from {_MIN_INTERVAL_S:g} to {_MAX_INTERVAL_S:g}"
        raise typer.BadParameter(f"must be a number of seconds {limits} (got {value})")
    return seconds


@one_line_errors()
def status(
    target: SchedulerTarget = DEFAULT_SCHEDULER,
    once: Annotated[
        bool, typer.Option("--once", help="Look twice, INTERVAL apart, print that and exit.")
    ] = False,
    interval: Annotated[
        float, typer.Option(parser=interval_s, help="Seconds from one look to the next.")
    ] = 1.0,
) -> None:
    """Shows the workers of a scheduler, its queue, and the blocks of their caches."""
    with Operations(target) as operations:
        if once:
            _show_once(operations, interval)
        else:
            with suppress(KeyboardInterrupt):
                _watch(operations, interval, Screen(sys.stdout))


def _show_once(operations: Operations, interval: float) -> None:
    before = operations.status(with_block_maps=False, timeout_s=_ANSWER_TIMEOUT_S)
    time.sleep(interval)
    now = operations.status(with_block_maps=True, timeout_s=_ANSWER_TIMEOUT_S)
    typer.echo("\n".join(report(now, before, DEFAULT_WIDTH)))


def _watch(operations: Operations, interval: float, screen: Screen) -> None:
    before: GetStatusResponse | None = None
    while True:
        try:
            now = operations.status(with_block_maps=True, timeout_s=_ANSWER_TIMEOUT_S)
        except QuireError as error:
            if error.code not in _PASSING:
                raise
            screen.show([str(error), "Trying again ..."])
        else:
            screen.show(report(now, before, screen.width))
            before = now
        time.sleep(interval)
