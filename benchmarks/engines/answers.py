"""The inner end of a child process that holds one system: it does what it is told by its parent.

Knows nothing but the standard library, because other environments' Pythons run it, too.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Handler = Callable[[], object]


def job() -> Any:
    """What the parent has written down for this process."""
    return json.loads(Path(sys.argv[1]).read_text())


def answer(handlers: Mapping[str, Handler]) -> None:
    """Says that it is ready, then answers commands, until the parent has no more.

    One line each way: a command's name on stdin, and JSON on a pipe of its own, because libraries
    print what they like.
    """
    with os.fdopen(int(sys.argv[2]), "w", buffering=1) as answers:
        answers.write("{}\n")
        for line in sys.stdin:
            answers.write(json.dumps(handlers[line.strip()]()) + "\n")
