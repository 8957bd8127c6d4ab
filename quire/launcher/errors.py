"""What callers of the launcher catch."""


class LaunchError(RuntimeError):
    """A local stack that cannot start or has lost a part. The message names the part, how it
    ended, and the last lines of its log, those of a warning or worse where there are any."""
