"""The server under test: the embedded default, and control over what is there."""
