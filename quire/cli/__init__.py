"""The `quire` command."""

from quire.cli.app import app
from quire.cli.ask import generate, models, tokenize
from quire.cli.bench import bench
from quire.cli.explain import explain
from quire.cli.health import health
from quire.cli.local import demo, serve
from quire.cli.replay import replay_recording
from quire.cli.reset_cache import reset_cache
from quire.cli.status import status

for command in (serve, generate, tokenize, models, health, status, reset_cache, bench, demo):
    app.command()(command)
app.command(name="replay")(replay_recording)
app.command()(explain)


def main() -> None:
    app()
