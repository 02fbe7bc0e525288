"""What can't be found out of a machine is left out, and costs no campaign."""

import subprocess

import pytest

from k25lib import environment


@pytest.mark.parametrize("fault", [subprocess.TimeoutExpired("nvidia-smi", 30), FileNotFoundError("nvidia-smi")])
def test_a_topology_that_can_not_be_asked_for_is_left_empty(monkeypatch, fault):
    def fails(*_, **__):
        raise fault

    monkeypatch.setattr(environment.subprocess, "run", fails)
    monkeypatch.setattr(environment, "gpus", lambda: [{"index": 0}])
    monkeypatch.setattr(environment, "_driver", lambda: {"driver": "580"})
    told = environment.machine()
    assert (told["topology"], told["driver"], told["gpus"]) == ("", "580", [{"index": 0}])


def test_the_topology_comes_without_its_legend_and_colours(monkeypatch):
    text = "\x1b[4mGPU0 GPU1\x1b[0m\nGPU0 X NV18\n\nLegend:\n  X = Self\n"
    monkeypatch.setattr(environment.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, text))
    monkeypatch.setattr(environment, "gpus", lambda: [{}])
    assert environment.machine()["topology"] == "GPU0 GPU1\nGPU0 X NV18"
