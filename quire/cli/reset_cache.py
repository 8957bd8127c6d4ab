"""The command that makes the workers forget cached prefixes."""

import typer

from quire.cli.app import SchedulerTarget, Timeout, one_line_errors
from quire.operations import DEFAULT_SCHEDULER, Operations


@one_line_errors()
def reset_cache(target: SchedulerTarget = DEFAULT_SCHEDULER, timeout: Timeout = 30.0) -> None:
    """Forgets every cached prefix on every worker; running requests go on."""
    with Operations(target) as operations:
        num_blocks = operations.reset_prefix_cache(timeout)
    typer.echo(f"{num_blocks} blocks forgotten")
