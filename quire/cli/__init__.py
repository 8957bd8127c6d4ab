"""The `quire` command: one module per group of subcommands, and what they share.

Called by the entry point `quire` and by `python -m quire`.
"""

import quire.service.grpc_verbosity  # noqa: F401
from quire.cli.app import app
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
    app()
