"""Signals of commands that run a stack."""

import signal
from typing import NoReturn


def interrupt_on_sigterm() -> None:
    """Make SIGTERM raise KeyboardInterrupt, so that the stack is drained.

    Also SIGINT, because a shell makes its background jobs ignore it.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt
