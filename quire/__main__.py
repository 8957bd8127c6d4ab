"""The `quire` command, also as `python -m quire`."""

import signal

# The imports take a good part of a second, in which an interrupt would print a traceback: it ends
# the process at once. One that ignores the signal, as in the background, goes on ignoring it.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from quire import cli


def main() -> None:
    """Run the command of the program's arguments."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    cli.main()


if __name__ == "__main__":
    main()
