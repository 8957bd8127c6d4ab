"""The command `demo`."""

from typing import Annotated

import typer

from quire.cli.app import Verbose, integer_option, report_errors
from quire.cli.interrupts import interrupt_on_sigterm
from quire.demo.demo import DEMO_MODEL, run_demo


@report_errors()
def demo(
    model: Annotated[str, typer.Argument(help="The model to show.")] = DEMO_MODEL,
    workers: Annotated[int, integer_option("Worker processes.")] = 2,
    verbose: Verbose = False,
) -> None:
    """Stream texts from a private stack and print their latencies. Then kill a worker, the
    leading scheduler and a gateway during a stream, and compare the text."""
    if workers < 1:
        raise ValueError(f"--workers: must be at least 1 (got {workers})")
    interrupt_on_sigterm()
    run_demo(model, num_workers=workers, verbose=verbose)
