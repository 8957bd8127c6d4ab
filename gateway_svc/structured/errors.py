"""The error of a format that is refused."""


class FormatError(ValueError):
    """The message says what is refused, its place within the format, and why."""
