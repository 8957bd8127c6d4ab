"""Errors of the whole worker."""


class WrongSettingError(ValueError):
    """An invalid setting; the message names it."""
