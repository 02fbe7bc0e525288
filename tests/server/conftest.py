"""A fake interpreter with vLLM, and an embedded server's surroundings in a temporary folder."""

import sys
from pathlib import Path

import pytest
from ports import free_port

FAKE = Path(__file__).with_name("fake_vllm.py")


@pytest.fixture
def fake_vllm(tmp_path, monkeypatch):
    """$K25_VLLM_PYTHON is the stand-in, $K25_CACHE a fresh folder; returns the project folder to give to Embedded."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("K25_VLLM_PYTHON", str(python))
    monkeypatch.setenv("K25_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def vllm(tmp_path):
    """The command of a stand-in `vllm serve` that knows --help=all, and its URL."""
    port = free_port()
    program = tmp_path / "vllm"
    program.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *--help=all*) echo "  --profiler-config PROFILER_CONFIG";; '
        f'*) exec {sys.executable} {FAKE} "$@";; esac\n'
    )
    program.chmod(0o755)
    return f"env MARKED=yes {program} serve 'a model' --port {port}", f"http://127.0.0.1:{port}"
