"""The `quire` command: one module per group of subcommands, and what they share.

Called by `quire/__main__.py`, which is the entry point.
"""

import sys

import quire.service.grpc_verbosity  # noqa: F401
from quire.cli.app import INTERRUPTED, app
from quire.cli.batch import run_batch
from quire.cli.beam_search import beam_search
from quire.cli.bench.command import bench
from quire.cli.chat import chat
from quire.cli.demo import demo
from quire.cli.inference import generate, models, tokenize
from quire.cli.keys import keys
from quire.cli.operations import health, reset_cache, shards, status
from quire.cli.pull import pull
from quire.cli.recordings import explain, replay
from quire.cli.serve.command_group import CommandGroup

for command in (
    *(chat, generate, beam_search, tokenize, models, health, status, shards, reset_cache),
    *(pull, run_batch, bench, demo, replay, explain),
):
    app.command()(command)
app.add_typer(keys)
app.info.cls = CommandGroup


def main() -> None:
    """Run a command, and report the errors that are none of its own."""
    try:
        app()
    except OSError as error:
        # The help could not be written.
        sys.exit(f"quire: {error}")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
