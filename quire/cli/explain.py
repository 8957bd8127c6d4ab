"""The command that draws one step."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from quire.cli.app import integer, one_line_errors
from quire.cli.step_drawing import draw_step
from quire.cli.worked_example import ENTRIES, HELLO, PUBLISHED
from quire.cli.worker_target import worker_channel, worker_target
from quire.errors import clear_errors
from quire.internal.v1 import worker_pb2, worker_pb2_grpc
from quire.recording import RecordingError, read_entries, read_hello

_Worker = Annotated[str | None, typer.Option(help="The worker to ask; a simulated one if absent.")]


@one_line_errors()
def explain(
    file: Annotated[Path | None, typer.Argument(help="What a worker wrote with --record.")] = None,
    step: Annotated[int | None, typer.Option(parser=integer, help="The step to draw.")] = None,
    example: Annotated[
        bool, typer.Option("--example", help="Draw a published worked example instead.")
    ] = False,
    worker: _Worker = None,
) -> None:
    """Draws a step of a recording: rows, token table, block table, and the inputs made of them.

    A worker's own code makes the tables; its lane and its device are not touched.
    """
    if example and (file is not None or step is not None):
        raise ValueError("--example draws steps of its own: leave FILE and --step out")
    if example:
        _explain_example(worker)
    elif file is None or step is None:
        raise ValueError("needs FILE and --step, or --example")
    else:
        entries = lane_until(file, step)
        typer.echo(draw_step(step, _explained(worker, entries), entries[0].hello.block_size))


def lane_until(file: Path, step: int) -> list[worker_pb2.Recording]:
    """`hello`, and the entries of the lane that ran the step, up to its plan."""
    hello = worker_pb2.Recording(hello=read_hello(file))
    lane, steps = [hello], []
    for entry in read_entries(file):
        kind = entry.WhichOneof("entry")
        if kind == "rows_cleared":
            lane = [hello]
        elif kind != "hello":
            lane.append(entry)
        if kind == "plan":
            steps.append(entry.plan.step)
            if entry.plan.step == step:
                return lane
    between = f"steps {steps[0]} to {steps[-1]}" if steps else "no steps"
    raise RecordingError(f"{file} has no step {step}; it has {between}")


def _explain_example(worker: str | None) -> None:
    with worker_target(worker, HELLO) as target:
        for number, published in enumerate(PUBLISHED, start=1):
            # `hello`, then a plan and, but for the last, its result.
            step = _ask(target, ENTRIES[: 2 * number])
            typer.echo(draw_step(number, step, HELLO.block_size))
            wrong = [name for name in published if list(getattr(step, name)) != published[name]]
            if wrong:
                raise RecordingError(f"not as published: {', '.join(wrong)}")
            typer.echo(f"All {len(published)} arrays that were published are the same.\n")


def _explained(worker: str | None, entries: list[worker_pb2.Recording]) -> worker_pb2.ExplainedStep:
    with worker_target(worker, entries[0].hello) as target:
        return _ask(target, entries)


def _ask(target: str, entries: Iterable[worker_pb2.Recording]) -> worker_pb2.ExplainedStep:
    with clear_errors(target), worker_channel(target) as channel:
        response = worker_pb2_grpc.WorkerServiceStub(channel).Explain(
            worker_pb2.ExplainRequest(entry=entry) for entry in entries
        )
        return response.step
