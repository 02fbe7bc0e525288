"""`k25 run` before any phase: bad words end it, one campaign at a time works on a run."""

import threading
import time

import pytest

from k25lib.campaign.plan import default_phases
from k25lib.campaign.servers import alone, alone_in
from k25lib.cli import main
from k25lib.cli.campaign import _chosen
from k25lib.run import Run
from k25lib.settings import NOTEBOOKS


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--url", ""], "--url is empty"),
        (["--resume", ""], "no run ''"),
        (["--resume", "newest"], "there is no campaign"),
        (["--wait", "nan"], "--wait takes a positive number of seconds, not nan"),
        (["--wait", "0"], "--wait takes a positive number of seconds, not 0"),
        (["--only", "7"], "--only 7: no such phase"),
        (["--campaign", "/"], "cannot read the campaign file /"),
    ],
)
def test_bad_words_are_one_line_and_leave_nothing(places, capsys, words, says):
    assert main(["run", *words]) == 2
    out, err = capsys.readouterr()
    assert says in err and (out, err.count("\n")) == ("", 1)
    assert list(places.iterdir()) == []


def test_an_interactive_run_is_not_resumed(places, capsys):
    run = Run.create("interactive", kind="interactive")
    assert main(["run", "--resume", run.path.name]) == 2
    assert "is no campaign" in capsys.readouterr().err


def test_what_is_left_of_a_run():
    class Resumed:
        manifest = {"phases": {name: {"state": "ok"} for name in list(NOTEBOOKS.values())[:4]}}

    phases = default_phases()
    assert _chosen(None, phases, "") == phases
    assert [phase.table for phase in _chosen(Resumed, phases, "")] == ["capture", "breakdown"]
    assert [phase.table for phase in _chosen(Resumed, phases, "2")] == ["macro"]


@pytest.mark.parametrize("held", ["url", "run"])
def test_a_second_campaign_waits_for_the_first(places, capsys, held):
    run = Run.create("x", kind="campaign")
    order = []

    def lock():
        return alone("http://127.0.0.1:9") if held == "url" else alone_in(run)

    def second():
        with lock():
            order.append("second")

    with lock():
        waiting = threading.Thread(target=second)
        waiting.start()
        time.sleep(0.3)
        order.append("first")
    waiting.join(10)
    assert order == ["first", "second"]
    assert "another campaign" in capsys.readouterr().err
