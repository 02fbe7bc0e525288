"""Errors that a user can act on: one line, said without a traceback."""


class K25Error(Exception):
    """Something could not be done (exit 1); the message is one line that says what to do."""

    exit_code = 1


class UsageError(K25Error):
    """The request itself is wrong: an unknown name, a bad value, a missing file (exit 2)."""

    exit_code = 2
