"""Runs in a child process with one system: executes the commands of the parent (`host`).

Imports only the standard library, because Pythons of other environments run it, too.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Handler = Callable[[], object]


def job() -> Any:
    """Return the job that the parent has written for this process."""
    return json.loads(Path(sys.argv[1]).read_text())


def serve(handlers: Mapping[str, Handler]) -> None:
    """Report readiness, then execute commands until stdin is closed.

    A command is a line with its name on stdin, a response is a line of JSON on a separate pipe,
    because libraries print to stdout and stderr.
    """
    with os.fdopen(int(sys.argv[2]), "w", buffering=1) as responses:
        responses.write("{}\n")
        for line in sys.stdin:
            responses.write(json.dumps(handlers[line.strip()]()) + "\n")
