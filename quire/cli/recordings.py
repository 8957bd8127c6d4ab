"""Commands for a worker's recordings: replay, explain."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from quire.cli.app import integer_option, report_errors
from quire.client.errors import translate_errors
from quire.internal.v1 import worker_pb2, worker_pb2_grpc
from quire.replay import replayer
from quire.replay.recording import RecordingError, read_entries, read_hello
from quire.replay.replay_worker import worker_channel, worker_target
from quire.replay.step_drawing import draw_step
from quire.replay.worked_example import ENTRIES, HELLO, PUBLISHED

_DIFFERENT = 1
_CANNOT_RUN = 2
_MAX_SHOWN = 10
_FILE_HELP = "A recording, written by a worker with --record."
_WORKER_HELP = "A worker that has no scheduler; a simulated one if absent."


@report_errors(_CANNOT_RUN)
def replay(
    file: Annotated[Path, typer.Argument(help=_FILE_HELP)],
    worker: Annotated[str | None, typer.Option(help=_WORKER_HELP)] = None,
    depth: Annotated[int, integer_option("Plans in flight.")] = 2,
) -> None:
    """Run the plans of a recording again and compare the results.

    Exits with 0 if all results are equal, with 1 if not, with 2 if the plans cannot be run.
    """
    num_steps = num_tokens = num_different = 0
    with (
        worker_target(worker, read_hello(file), file) as target,
        worker_channel(target) as channel,
    ):
        for replayed in replayer.replay(file, target, channel, depth):
            num_steps += 1
            num_tokens += len(replayed.result.sampled_token_ids) if replayed.result else 0
            if (difference := replayed.difference) is not None:
                num_different += 1
                if num_different <= _MAX_SHOWN:
                    typer.echo(f"step {replayed.recorded.plan.step}: {difference}")
    verdict = f"{num_different} steps differ" if num_different else "all as recorded"
    where = worker or "a simulated worker"
    typer.echo(f"{num_steps} steps, {num_tokens} tokens on {where}: {verdict}")
    if num_different:
        raise typer.Exit(_DIFFERENT)


@report_errors()
def explain(
    file: Annotated[Path | None, typer.Argument(help=_FILE_HELP)] = None,
    step: Annotated[int | None, integer_option("The step to draw.")] = None,
    example: Annotated[
        bool, typer.Option("--example", help="Draw a published worked example instead.")
    ] = False,
    worker: Annotated[str | None, typer.Option(help=_WORKER_HELP)] = None,
) -> None:
    """Draw a step of a recording: rows, token table, block table, and the model's inputs.

    The worker computes them with its own code, and uses neither its lane nor its device.
    """
    if example and (file is not None or step is not None):
        raise ValueError("--example has its own steps: omit FILE and --step")
    if example:
        _explain_example(worker)
    elif file is None or step is None:
        raise ValueError("FILE and --step are required, or --example")
    else:
        entries = lane_until(file, step)
        with worker_target(worker, entries[0].hello) as target:
            explained = _explain(target, entries)
        typer.echo(draw_step(step, explained, entries[0].hello.block_size))


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
            # `hello`, then pairs of plan and result, without the last result.
            step = _explain(target, ENTRIES[: 2 * number])
            typer.echo(draw_step(number, step, HELLO.block_size))
            wrong = [name for name in published if list(getattr(step, name)) != published[name]]
            if wrong:
                raise RecordingError(f"not as published: {', '.join(wrong)}")
            typer.echo(f"All {len(published)} published arrays are equal.\n")


def _explain(target: str, entries: Iterable[worker_pb2.Recording]) -> worker_pb2.ExplainedStep:
    with translate_errors(target), worker_channel(target) as channel:
        response = worker_pb2_grpc.WorkerServiceStub(channel).Explain(
            worker_pb2.ExplainRequest(entry=entry) for entry in entries
        )
        return response.step
