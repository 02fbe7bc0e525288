"""A fake interpreter with vLLM, and an embedded server's surroundings in a temporary folder."""

import sys
from pathlib import Path

import pytest


@pytest.fixture
def fake_vllm(tmp_path, monkeypatch):
    """$K25_VLLM_PYTHON is the stand-in, $K25_CACHE a fresh folder; returns the project folder to give to Embedded."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("fake_vllm.py")} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("K25_VLLM_PYTHON", str(python))
    monkeypatch.setenv("K25_CACHE", str(tmp_path / "cache"))
    return tmp_path
