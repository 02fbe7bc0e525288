"""config.json -> the GEMMs, collectives and bytes of one decode step on one rank."""

from .config import read_config
from .step import Model, Step, touched_experts

__all__ = ["Model", "Step", "load_model", "touched_experts"]


def load_model(path, overrides=None):
    """The Model of a config.json (or of the folder that holds one).

    `overrides` replaces keys of the text config, as a server's --hf-overrides does. Raises UsageError for a file that
    cannot be read, K25Error for an architecture of no known family or a config that lacks a dimension.
    """
    return Model(read_config(path, overrides))
