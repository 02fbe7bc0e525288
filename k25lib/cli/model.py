"""Commands: model."""


def add(commands):
    """Declare the commands of this module."""
