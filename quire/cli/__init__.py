"""The `quire` command."""

from quire.cli.app import app
from quire.cli.ask import generate, models, tokenize
from quire.cli.health import health
from quire.cli.local import demo, serve

for command in (serve, generate, tokenize, models, health, demo):
    app.command()(command)


def main() -> None:
    app()
