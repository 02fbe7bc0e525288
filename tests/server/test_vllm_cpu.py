"""vLLM's environment and the tiny model: made once, remade when half-made or out of date, missing things told."""

import json
import platform
import re
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from k25lib.errors import K25Error
from k25lib.server import vllm_cpu


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.delenv("K25_VLLM_PYTHON", raising=False)
    monkeypatch.delenv("K25_CACHE", raising=False)
    return tmp_path


@pytest.fixture
def installs(monkeypatch):
    """Replaces pip: counts, and makes a `bin/python`."""
    made = []

    def install(part, venv, log, lock, on_stage):
        made.append(venv)
        (part / "bin").mkdir(parents=True)
        (part / "bin" / "python").symlink_to(sys.executable)

    monkeypatch.setattr(vllm_cpu, "_install", install)
    return made


def test_made_once_and_remade_when_not_whole_or_out_of_date(root, installs, monkeypatch):
    def python():
        return vllm_cpu.interpreter(root, lambda text: None)

    assert python() == root / ".venv-vllm" / "bin" / "python" and len(installs) == 1
    assert python().exists() and len(installs) == 1
    (root / ".venv-vllm" / vllm_cpu.STAMP).unlink()  # half-made: an installation that was cut off, or made by hand
    assert python().exists() and len(installs) == 2
    (root / ".venv-vllm" / "bin" / "python").unlink()
    (root / ".venv-vllm" / "bin" / "python").symlink_to("/gone/python3.11")  # its interpreter was removed
    assert python().exists() and len(installs) == 3
    (root / ".venv-vllm.part" / "bin").mkdir(parents=True)  # what a killed process left
    monkeypatch.setattr(vllm_cpu, "PINS", root / "pins.txt")
    (root / "pins.txt").write_text("vllm-cpu==9\n")
    assert python().exists() and len(installs) == 4
    assert sorted(p.name for p in root.iterdir()) == [".cache", ".venv-vllm", ".venv-vllm.lock", "pins.txt"]


def test_a_failed_installation_keeps_what_was_there(root, installs, monkeypatch):
    vllm_cpu.interpreter(root, str)
    stamp = root / ".venv-vllm" / vllm_cpu.STAMP
    stamp.write_text("old")

    def fail(part, *_):
        part.mkdir()
        raise K25Error("no")

    monkeypatch.setattr(vllm_cpu, "_install", fail)
    with pytest.raises(K25Error):
        vllm_cpu.interpreter(root, str)
    assert stamp.read_text() == "old" and not (root / ".venv-vllm.part").exists()


Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize(
    ("where", "name", "value", "words"),
    [
        (platform, "machine", lambda: "riscv64", "^vLLM's CPU build exists for Linux on x86-64 and arm64, not .*--url"),
        (sys, "platform", "darwin", "not for darwin"),
        (sys, "version_info", (3, 10, 1), "needs Python 3.11 to 3.14"),
        (sys, "version_info", (3, 15, 0), "needs Python 3.11 to 3.14"),
        (shutil, "disk_usage", lambda _: Usage(10**12, 10**12, 10**9), "has 1.0 GB free; .* needs 4 GB"),
    ],
)  # fmt: skip
def test_what_this_machine_lacks_is_told(root, monkeypatch, where, name, value, words):
    monkeypatch.setattr(where, name, value)
    with pytest.raises(K25Error, match=words) as error:
        vllm_cpu._check_machine(root)
    monkeypatch.undo()
    assert "\n" not in str(error.value)


def test_a_wrong_interpreter_is_told(root, monkeypatch):
    monkeypatch.setenv("K25_VLLM_PYTHON", "/no/python")
    with pytest.raises(K25Error, match="K25_VLLM_PYTHON=/no/python is no program"):
        vllm_cpu.interpreter(root, str)


@pytest.mark.slow  # makes a venv
def test_no_package_index_is_told(root, monkeypatch):
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    stages = []
    with pytest.raises(K25Error, match=r"^pip could not install torch \(does pip reach a package index from here\?\)"):
        vllm_cpu.interpreter(root, stages.append)
    assert stages == ["making .venv-vllm", "installing torch"]
    assert "torch==" in (root / ".cache" / "vllm-install.log").read_text()
    assert not (root / ".venv-vllm").exists() and not (root / ".venv-vllm.part").exists()


def test_pins_are_exact_and_without_what_breaks():
    lines = [x for x in vllm_cpu.PINS.read_text().splitlines() if not x.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.+]+( ; platform_machine == \"x86_64\")?", line) for line in lines)
    names = {line.partition("==")[0] for line in lines}
    assert {"torch", "vllm-cpu", "transformers"} <= names
    assert not names & {"torchvision", "torchaudio", "torchcodec", "triton", "vllm"}
    assert "torch==2.13.0" in lines  # no local version: an index that is not ours has no +cpu


def test_the_model_is_remade_when_its_program_changes(root, fake_vllm, monkeypatch):
    python = vllm_cpu.interpreter(root, str)
    folder = vllm_cpu.tiny_model(root, python, str)
    (folder / "mark").touch()
    assert vllm_cpu.tiny_model(root, python, str) == folder and (folder / "mark").exists()
    changed = root / "tiny_model.py"
    changed.write_text("another one")
    changed.with_suffix(".json").write_text("{}")
    monkeypatch.setattr(vllm_cpu, "TINY_MODEL", changed)
    vllm_cpu.tiny_model(root, python, str)
    assert (folder / "config.json").exists() and not (folder / "mark").exists()


@pytest.mark.slow
def test_the_tiny_model_is_a_kimi_and_always_the_same(tmp_path):
    root = Path(__file__).parents[2]
    python = vllm_cpu.interpreter(root, print)
    folder = vllm_cpu.tiny_model(root, python, print)
    again = tmp_path / "again"
    again.mkdir()
    subprocess.run([python, vllm_cpu.TINY_MODEL, again], check=True, cwd=tmp_path)
    names = sorted(p.name for p in again.iterdir())
    assert names == sorted(p.name for p in folder.iterdir() if p.name != vllm_cpu.STAMP)
    assert sum(name.endswith(".safetensors") for name in names) == 4
    for name in names:
        assert (again / name).read_bytes() == (folder / name).read_bytes(), name
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["KimiK25ForConditionalGeneration"]
    assert config["text_config"]["num_hidden_layers"] == 4
