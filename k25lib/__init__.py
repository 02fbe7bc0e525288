"""Finds where the decode time of a served LLM goes, and what would shorten it."""

__version__ = "0.1.0"
