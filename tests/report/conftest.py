"""A run with everything in it, and one with nothing but a manifest."""

import pytest

from k25lib.run import Run


@pytest.fixture
def bare_run(tmp_path):
    return Run.create("bench", tmp_path / "runs", title="Kimi-K2.5 on one box")


@pytest.fixture
def make_run(tmp_path):
    """A function that makes a run from `states`: {phase: (state, why)}."""

    def make(states=None, **manifest):
        phases = {
            name: {
                "state": state,
                "why": why,
                "question": f"Question of {name}?",
                **({"seconds": 1.25} if state == "ok" else {}),
            }
            for name, (state, why) in (states or {"01_service_check": ("ok", "")}).items()
        }
        return Run.create("bench", tmp_path / "runs", title="Kimi-K2.5 on one box", phases=phases, **manifest)

    return make
