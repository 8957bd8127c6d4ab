"""What `make up` prints of containers that are not healthy. Docker is a script here."""

import os
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "print-unhealthy-logs.sh"
DOCKER = """#!/bin/sh
for last; do :; done
case "$1 $last" in
  'compose --quiet') echo well plain sick ended gone ;;
  'inspect well') echo '/well healthy' ;;
  'inspect plain') echo '/plain ' ;;
  'inspect sick') echo '/sick unhealthy' ;;
  'inspect ended') echo '/ended exited' ;;
  'inspect gone') exit 1 ;;
  logs*) echo "arguments: $*"; echo "$last: no model" >&2 ;;
esac
"""


def test_logs_of_containers_that_are_not_healthy_are_printed(tmp_path: Path) -> None:
    docker = tmp_path / "docker"
    docker.write_text(DOCKER)
    docker.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "COMPOSE": "docker compose"}
    done = subprocess.run([SCRIPT], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "sick unhealthy:",
        "  arguments: logs --tail 5 sick",
        "  sick: no model",
        "ended exited:",
        "  arguments: logs --tail 5 ended",
        "  ended: no model",
    ]
